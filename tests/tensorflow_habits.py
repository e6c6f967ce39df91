"""What openai/baselines has of TensorFlow and ppo_procgen.py has not: Adam's epsilon and the padding of a pool."""

import math

import torch
import torch.nn.functional as F


class TensorFlowAdam(torch.optim.Optimizer):
    """Adam with epsilon before the bias correction: lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + eps)."""

    def __init__(self, params, lr, eps: float, **_) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        correction = math.sqrt(1 - 0.999**self.num_steps) / (1 - 0.9**self.num_steps)
        (group,) = self.param_groups
        for param in group["params"]:
            if not self.state[param]:
                self.state[param].update(m=torch.zeros_like(param), v=torch.zeros_like(param))
            m, v = self.state[param]["m"], self.state[param]["v"]
            m.lerp_(param.grad, 0.1)
            v.lerp_(param.grad.square(), 0.001)
            param -= float(group["lr"]) * correction * m / (v.sqrt() + group["eps"])


def max_pool2d(x, kernel_size, stride, padding, original=F.max_pool2d):
    """Pads below and on the right only."""
    return original(x, kernel_size, stride=stride, ceil_mode=True)


def install(setattr) -> None:
    setattr(torch.optim, "Adam", TensorFlowAdam)
    setattr(F, "max_pool2d", max_pool2d)
