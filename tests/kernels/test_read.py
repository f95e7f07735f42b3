"""The kernel that the ceiling of reading is measured with."""

import numpy as np
import torch

from experiments.lab.kernels.read import read


def test_all_words_are_read(device: torch.device) -> None:
    """Of a buffer whose last tile is not full: each word changes what is found."""
    words = torch.randint(2**31 - 1, (3 * 8192 + 5,), dtype=torch.int32, device=device)
    expected = np.bitwise_xor.reduce(words.cpu().numpy())
    assert np.bitwise_xor.reduce(read(words.view(torch.float32)).cpu().numpy()) == expected
