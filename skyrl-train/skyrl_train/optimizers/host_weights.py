"""Float32 master weights in host memory, for optimizer steps on the CPU."""

from collections.abc import Iterable

import torch


class HostWeights:
    """Float32 copies of trained parameters in host memory, which an optimizer updates there.

    A gradient moves to its master copy as soon as a backward pass has completed it, so the device holds few gradients
    at a time. The device's weights, in float32 or bfloat16, are the master weights rounded to nearest.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the values of the parameters. From now on, they have no `grad` after a backward pass."""
        self.masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._staging = torch.empty(0)  # pinned memory for a gradient that is added to an earlier one
        for parameter in parameters:
            values = parameter.detach().to("cpu", torch.float32, copy=True)
            self.masters[parameter] = torch.nn.Parameter(values)
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    @torch.no_grad()
    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient to its master copy's, and free it."""
        assert isinstance(parameter, torch.nn.Parameter)
        master, grad = self.masters[parameter], parameter.grad
        assert grad is not None
        parameter.grad = None
        if master.grad is not None:
            master.grad.add_(grad if grad.device.type == "cpu" else self._stage(grad))
        elif grad.device.type == "cpu":
            master.grad = grad.float()
        else:
            # The copy runs in the order of the device's stream, before its memory is used again. `finish` waits for it.
            host = torch.empty(grad.shape, dtype=torch.float32, pin_memory=True)
            master.grad = host.copy_(grad, non_blocking=True)

    def _stage(self, grad: torch.Tensor) -> torch.Tensor:
        """Copy a gradient to pinned memory. It is valid until the next call."""
        if self._staging.numel() < grad.numel() or self._staging.dtype != grad.dtype:
            self._staging = torch.empty(grad.numel(), dtype=grad.dtype, pin_memory=True)
        staged = self._staging[: grad.numel()].view(grad.shape).copy_(grad, non_blocking=True)
        torch.cuda.synchronize(grad.device)  # also waits for the copy that created the sum
        return staged

    def finish_gradients(self) -> None:
        """Wait for copies of gradients in progress. Call it before the gradients of the master copies are read."""
        for device in {parameter.device for parameter in self.masters if parameter.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights to the device."""
        for parameter, master in self.masters.items():
            parameter.copy_(master)
