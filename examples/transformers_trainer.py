"""Fine-tune a transformers model with its Trainer in 80 % of the memory: python examples/transformers_trainer.py"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat.torch as rt

BATCH, LENGTH = 4, 32


def main(steps: int = 10, budget: str | float | None = 0.8) -> list[float]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=101, n_positions=64))
    data = [{name: torch.randint(0, 101, (LENGTH,)) for name in ("input_ids", "labels")} for _ in range(64)]

    model.config.use_cache = False  # as the Trainer sets it
    if budget is not None:
        # What the Trainer passes: a batch, and the number of labels in it.
        batch = {name: torch.stack([example[name] for example in data[:BATCH]]) for name in data[0]}
        batch["num_items_in_batch"] = torch.tensor(float(BATCH * LENGTH))
        model = rt.rematerialize(model, (), budget, sample_kwargs=batch, optimizer="adam", time_limit_s=10)
        print(model.plan)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=steps, logging_steps=1, eval_strategy="steps",
            eval_steps=steps // 2, save_steps=steps // 2, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8]).train()
        # Go on from the checkpoint in the middle, as after an interruption.
        again = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
        GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-{steps}")  # the plain model's checkpoint
    return [entry[name] for entry in again.state.log_history for name in ("loss", "eval_loss") if name in entry]


if __name__ == "__main__":
    print("losses", *(f"{loss:.3f}" for loss in main()))
