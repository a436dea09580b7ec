"""The call that publish.py makes on what it has just published, on a CPU or a GPU."""

from types import ModuleType

import torch


def smoke(kernel: ModuleType) -> None:
    """Run experts that multiply by 1, 2, 3 and 4, and check values known by hand."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.eye(32, device=device, dtype=torch.float16)
    # silu(32) * (1 / 32) is 1 and silu(0) * 0 is 0: between its weights, an expert keeps `one`.
    gate, up = (32 * one).expand(4, 32, 32), (one / 32).expand(4, 32, 32)
    down = torch.stack([one, 2 * one, 3 * one, 4 * one])

    # In the softmax, logits of 200 leave nothing to those of 0; of equals, the lowest is first.
    router = torch.tensor([0.0, 200.0, 0.0, 200.0], device=device)[:, None].expand(4, 32)
    for tokens in (1, 32):
        x = one[:tokens]
        out, ids, weights = kernel.fused_moe_forward(x, router, gate, up, down, 4, 2)
        assert out.dtype is torch.float16 and torch.equal(out, 3 * x)
        assert ids.tolist() == [[1, 3]] * tokens and weights.tolist() == [[0.5, 0.5]] * tokens

    gate_up = torch.cat((gate, up), 1)
    ids, _ = kernel.route(torch.tensor([[1.0, 0.0, 3.0, 2.0]], device=device).expand(32, 4), 3)
    assert ids.tolist() == [[2, 3, 0]] * 32
    ids[:, 1] = -1  # one that is elsewhere
    mix = torch.tensor([[0.5, 7.0, 0.25]], device=device).repeat(32, 1).requires_grad_()
    out = kernel.fused_experts(one, gate_up, down, ids, mix)
    assert torch.equal(out, 1.75 * one)
    out.sum().backward()
    assert mix.grad is not None and mix.grad.tolist() == [[3.0, 0.0, 1.0]] * 32
