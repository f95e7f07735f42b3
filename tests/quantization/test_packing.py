"""Layouts of small codes, each against its definition written out one code at a time."""

import pytest
import torch

from mini_infer.quantization.packing import AWQ_PLACES, pack_int4, pack_words, unpack_int4, unpack_words


def drawn(rows, columns, bits=4):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("columns", [1, 63, 128, 200, 384])
def test_a_pair_of_bytes_of_int4_has_four_columns_32_apart(columns):
    codes = drawn(3, columns)
    packed = pack_int4(codes.to(torch.int8), symmetric=False)
    assert torch.equal(pack_int4(codes.to(torch.int8) - 8, symmetric=True)[:, :columns], packed[:, :columns])
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, -(-columns // 128) * 64)
    for column in range(columns):
        tile, place = divmod(column, 128)
        byte = packed[:, tile * 64 + place % 32 * 2 + place // 64]
        assert torch.equal(byte >> 4 if place % 64 >= 32 else byte & 15, codes[:, column])
    assert torch.equal(unpack_int4(packed, False, columns), codes.to(torch.int8))
    assert torch.equal(unpack_int4(packed, True, columns), codes.to(torch.int8) - 8)
    assert not unpack_int4(packed, False)[:, columns:].any()


@pytest.mark.parametrize(("bits", "places"), [(4, None), (4, AWQ_PLACES), (8, None)])
def test_words_hold_their_numbers_at_their_places(bits, places):
    codes = drawn(3, 48, bits)
    words = pack_words(codes, bits, places)
    assert words.dtype == torch.int32
    count = 32 // bits
    for column in range(48):
        word, j = divmod(column, count)
        place = j if places is None else places[j]
        assert torch.equal(words[:, word].long() >> bits * place & 2**bits - 1, codes[:, column].long())
    assert torch.equal(unpack_words(words, bits, places), codes)


def test_awq_has_even_columns_in_the_low_half_of_a_word():
    # The order of AWQ's own packer: the number i of a word is the column [0, 2, 4, 6, 1, 3, 5, 7][i].
    (word,) = pack_words(torch.arange(8)[None], 4, AWQ_PLACES)[0].tolist()
    assert f"{word & 0xFFFFFFFF:08x}" == "75316420"


def test_the_last_word_is_filled_up():
    codes = drawn(2, 11)
    words = pack_words(codes, 4)
    assert words.shape == (2, 2)
    assert torch.equal(unpack_words(words, 4)[:, :11], codes)
