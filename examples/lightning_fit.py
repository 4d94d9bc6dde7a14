"""Train a Lightning module in 60 % of the memory: python examples/lightning_fit.py"""

import tempfile

import lightning
import torch
from torch import nn
from torch.nn import functional as F

import remat.torch as rt


class Classifier(lightning.LightningModule):
    """The network is planned; the loss and the loop around it stay Lightning's."""

    def __init__(self, budget: str | float | None):
        super().__init__()
        self.losses = list[float]()
        network = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)),
                                nn.Linear(64, 10))  # fmt: skip
        if budget is not None:
            sample = torch.empty(256, 64, device="meta")  # only shape and type count
            # Lightning zeroes gradients after the forward pass, in which those of the step before still exist.
            network = rt.rematerialize(network, (sample,), budget, optimizer="adam", accumulate=True, time_limit_s=10)
            print(network.plan)
        self.network = network

    def training_step(self, batch, _index):
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _index):
        self.losses.append(F.cross_entropy(self.network(batch[0]), batch[1]).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 10, budget: str | float | None = 0.6) -> list[float]:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    loader = torch.utils.data.DataLoader(data, batch_size=256)
    model = Classifier(budget)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_steps=steps // 2, default_root_dir=folder, **quiet)
        trainer.fit(model, loader, loader)
        trainer.save_checkpoint(f"{folder}/half.ckpt")
        trainer = lightning.Trainer(max_steps=steps, default_root_dir=folder, **quiet)
        trainer.fit(model, loader, loader, ckpt_path=f"{folder}/half.ckpt")
    return model.losses


if __name__ == "__main__":
    print("losses", *(f"{loss:.3f}" for loss in main()))
