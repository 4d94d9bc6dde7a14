"""Train with accelerate in 60 % of the memory: python examples/accelerate_loop.py"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import remat.torch as rt


def main(steps: int = 10, budget: str | float | None = 0.6) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)),
                          nn.Linear(64, 10))  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    loader = torch.utils.data.DataLoader(data, batch_size=256)
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        sample = torch.empty(256, 64, device="meta")  # only shape and type count
        model = rt.rematerialize(model, (sample,), budget, optimizer=optimizer, time_limit_s=10)
        print(model.plan)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        while len(losses) < steps:
            model.train()
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            accelerator.save_state(folder)
            accelerator.load_state(folder)
            model.eval()
            with torch.no_grad():
                losses.append(sum(F.cross_entropy(model(inputs), labels).item() for inputs, labels in loader))
    return losses[:steps]


if __name__ == "__main__":
    print("losses", *(f"{loss:.3f}" for loss in main()))
