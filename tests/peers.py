"""Peers that `make bench` measures the fused step against: MERIT as its formula is usually typed."""

import torch


class PlainMERIT(torch.optim.Optimizer):
    """The authors' formula (variant "official") as a plain loop over parameters, a torch operation a term."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """One step of every parameter."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                u = m / (v.sqrt() + group["eps"])
                u = u + group["weight_decay"] * p
                b = self.ratio(p.abs().max(), u.abs().max())
                if p.ndim > 1:
                    w_row, u_row = p.abs().amax(1, keepdim=True), u.abs().amax(1, keepdim=True)
                    w_column, u_column = p.abs().amax(0, keepdim=True), u.abs().amax(0, keepdim=True)
                    s = torch.max(torch.max(w_row / u_row, w_column / u_column), b)
                    there = (w_row != 0) & (u_row != 0) & (w_column != 0) & (u_column != 0)
                    s = torch.where(there, s, torch.ones_like(s))
                else:
                    s = b.expand_as(p)
                p.sub_(group["lr"] * torch.clamp(s * u, -1, 1))

    @staticmethod
    def ratio(weight_norm, direction_norm):
        """1 where either norm is 0."""
        there = (weight_norm != 0) & (direction_norm != 0)
        return torch.where(there, weight_norm / direction_norm, torch.ones_like(weight_norm))
