"""Train one model over two processes in 60 % of a rank's memory: torchrun --nproc-per-node=2 examples/fsdp_loop.py

On GPUs call torch.cuda.set_device with the local rank, move the model there, and give the backend "nccl".
"""

import torch
from torch import Tensor, distributed, nn

import remat.torch as rt


class Net(nn.Module):
    def __init__(self, width: int = 64, n_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(n_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def main(steps: int = 10, budget: str | float = 0.6) -> list[float]:
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)  # the same weights in each process
    model = Net()
    torch.manual_seed(1 + rank)  # other data
    batch = torch.randn(512, 64), torch.randint(0, 10, (512,))

    # The one line. It calls fully_shard; make the optimizer afterwards.
    model = rt.rematerialize(model, batch, budget, shard=ranks, optimizer="adamw", time_limit_s=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == 0:
        print(model.plan)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print("losses", *(f"{loss:.3f}" for loss in losses))
    distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
