"""The two-layer MLP of Paddle's quick start: 784 -> 128 tanh -> 128 tanh -> 10."""

from __future__ import annotations

import torch


class MnistMlp(torch.nn.Module):
    """(batch, ...) float32 images of `inputs` values -> (batch, classes) logits."""

    def __init__(self, inputs: int = 784, classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.fc_1 = torch.nn.Linear(inputs, hidden)
        self.fc_2 = torch.nn.Linear(hidden, hidden)
        self.prediction = torch.nn.Linear(hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        hidden = torch.tanh(self.fc_1(flat))
        logits: torch.Tensor = self.prediction(torch.tanh(self.fc_2(hidden)))
        return logits
