"""Train a PyTorch model in 60 % of the memory that it needs: python examples/torch_loop.py"""

import torch
from torch import nn
from torch.nn import functional as F

import remat.torch as rt


def block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def main(steps: int = 10, budget: str | float = 0.6) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(block(3, 32), *(block(32, 32) for _ in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Dropout(0.1), nn.Linear(32, 10))  # fmt: skip
    images, labels = torch.randn(16, 3, 48, 48), torch.randint(0, 10, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # The one line. `budget` may also be a size, e.g. "8GB".
    model = rt.rematerialize(model, (images,), budget, optimizer=optimizer, time_limit_s=10)
    print(model.plan)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("losses", *(f"{loss:.3f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
