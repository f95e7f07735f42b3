"""What PEFT's own library computes with two adapters that it has made, in tests/runtime/peft, for tests without it. To
make it again:

pip install peft && python tests/runtime/peft_reference.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FOLDER = Path(__file__).parent / "peft"
MODEL = "tiny-draft"
TARGETS = {"trained": ["q_proj", "v_proj", "down_proj"], "rslora": "all-linear"}
PROMPTS = ["def fibonacci(n):", "class Tree:\n    def __init__(self", "import "]
NEW_TOKENS = 12
BASE = "__base__"  # PEFT's name of no adapter


def main() -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mini_infer.assets import shipped_path

    torch.manual_seed(0)
    base = shipped_path(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def new_model():
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    trained = peft.LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS["trained"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(new_model(), trained, adapter_name="trained")
    ids = tokenizer(Path(__file__).read_text(), return_tensors="pt").input_ids[:, :512]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    random = peft.LoraConfig(
        r=2, lora_alpha=1, target_modules=TARGETS["rslora"], use_rslora=True, init_lora_weights=False
    )  # fmt: skip
    model.add_adapter("rslora", random)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().float()  # small files, and what they hold is what is computed
    model.eval()
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    model.save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink(missing_ok=True)
    for config in FOLDER.glob("*/adapter_config.json"):
        values = json.loads(config.read_text()) | {"base_model_name_or_path": MODEL}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")

    names = [BASE, *TARGETS]
    found = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
        rows = prompt_ids.repeat(len(names), 1)
        logprobs = []
        with torch.no_grad():
            for _ in range(NEW_TOKENS):  # one batch, each row with its own adapter
                row = model(input_ids=rows, adapter_names=names).logits[:, -1].log_softmax(-1)
                logprobs.append(row.max(-1).values)
                rows = torch.cat([rows, row.argmax(-1, keepdim=True)], dim=1)
        for index, name in enumerate(names):
            tokens = rows[index, prompt_ids.shape[1] :].tolist()
            values = [round(float(step[index]), 5) for step in logprobs]
            found.append({"prompt": prompt, "adapter": name, "token_ids": tokens, "logprobs": values})
    for name in TARGETS:
        merged = peft.PeftModel.from_pretrained(new_model(), FOLDER / name).merge_and_unload().eval()
        for each in (each for each in found if each["adapter"] == name):
            rows = tokenizer(each["prompt"], return_tensors="pt").input_ids
            rows = torch.cat([rows, torch.tensor([each["token_ids"]])], dim=1)
            with torch.no_grad():
                values = merged(rows).logits.log_softmax(-1).max(-1)
            assert values.indices[0, -NEW_TOKENS - 1 : -1].tolist() == each["token_ids"], "merged weights agree"
    document = {"peft": peft.__version__, "model": MODEL, "answers": found}
    (FOLDER / "expected.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
