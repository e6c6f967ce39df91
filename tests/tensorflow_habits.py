"""What openai/baselines has of TensorFlow and ppo_procgen.py has not: Adam's epsilon and the padding of a pool."""

import math

import torch
import torch.nn.functional as F


class TensorFlowAdam(torch.optim.Adam):
    """Adam with epsilon before the bias correction: lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + eps)."""

    def __init__(self, params, lr, eps: float, **_) -> None:
        super().__init__(params, lr, eps=eps)
        self.eps, self.num_steps = eps, 0

    def step(self) -> None:
        self.num_steps += 1
        self.param_groups[0]["eps"] = self.eps / math.sqrt(1 - 0.999**self.num_steps)  # torch's epsilon comes after it
        super().step()


def max_pool2d(x, kernel_size, stride, *_, original=F.max_pool2d, **__):
    """TensorFlow's padding: below and on the right only, as far as the last window needs it."""
    return original(x, kernel_size, stride=stride, ceil_mode=True)


def install(setattr) -> None:
    setattr(torch.optim, "Adam", TensorFlowAdam)
    setattr(F, "max_pool2d", max_pool2d)
