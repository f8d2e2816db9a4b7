"""The autograd function that replays a captured backbone."""

from typing import Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from liger_trainer.varlen.graphs.graph_recorder import GraphRecorder
from liger_trainer.varlen.graphs.static_batch import CapturedSize, TokenBatch


class Captures(Protocol):
    """The part of `BackboneGraphs` that a replay uses.

    Attributes:
        generation (`int`): Identifies the activations in the pool. Every replay overwrites them and adds 1.
        carrier (`torch.Tensor`): A scalar that requires a gradient.
        recorder (`GraphRecorder`): The recorder of the device.
    """

    generation: int
    carrier: torch.Tensor
    recorder: GraphRecorder

    def replay_forward(self, size: CapturedSize, batch: TokenBatch) -> tuple[torch.Tensor, ...]: ...


class Replayed(torch.autograd.Function):
    """The captured backbone in autograd: a function of its embeddings and of a scalar that requires a gradient.

    The parameters are not inputs, because 448 of them would take the host longer than everything else in a step. The
    backward itself adds to their `.grad`. `loss.backward()` would add the same; `torch.autograd.grad` and
    `backward(inputs=...)` would not, so they raise an error. The scalar makes the outputs require a gradient even if
    the embeddings are frozen.
    """

    @staticmethod
    def forward(ctx, embeds, per_layer, carrier, graphs: Captures, draws: bool, size: CapturedSize, batch: TokenBatch):  # noqa: ANN001
        # Saved only so that reading them in backward raises if they were modified in place.
        ctx.save_for_backward(embeds, per_layer)
        detached = None if per_layer is None else per_layer.detach()
        ctx.replayed = graphs, size, batch._replace(embeds=embeds.detach(), per_layer=detached)
        ctx.random_state = graphs.recorder.random_state() if draws else None
        outputs = graphs.replay_forward(size, batch)
        assert size.snapshot is not None, "it was captured"
        ctx.generation, ctx.versions = graphs.generation, size.snapshot.versions()
        return outputs

    @staticmethod
    def backward(ctx, *gradients):  # noqa: ANN001 - zeros for an unused output
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The backbone of this step is captured (cuda_graphs), so that its gradients have no gradients of their "
                "own (create_graph=True). Set cuda_graphs: false for a second derivative."
            )
        graphs, size, batch = ctx.replayed
        # Only `loss.backward()` computes a gradient for every leaf, and so for the carrier.
        if not torch._C._will_engine_execute_node(get_gradient_edge(graphs.carrier).node):
            raise RuntimeError(
                "The backbone of this step is captured (cuda_graphs), so that its weights get their gradients from "
                "loss.backward() alone. Set cuda_graphs: false to call torch.autograd.grad or backward(inputs=...)."
            )
        ctx.saved_tensors  # noqa: B018 - raises if they were modified in place
        if not size.snapshot.is_as_in_forward(ctx.versions):
            raise RuntimeError(
                "A weight of the captured backbone has been modified by an inplace operation, moved to other memory or "
                "frozen between its forward and its backward pass. Set cuda_graphs: false where that is intended."
            )
        now = None if ctx.random_state is None else graphs.recorder.random_state()
        if ctx.random_state is not None:  # checkpointed layers, which run again, draw the numbers of the forward
            graphs.recorder.set_random_state(ctx.random_state)
        if ctx.generation != graphs.generation:  # another replay has overwritten the activations of this forward
            graphs.replay_forward(size, batch)
            if ctx.random_state is not None:
                graphs.recorder.set_random_state(ctx.random_state)
        graphs.generation += 1  # the backward uses up the activations
        for buffer, gradient in zip(size.exchange, gradients, strict=True):
            buffer[:, : batch.tokens].copy_(gradient)
            buffer[:, batch.tokens :].zero_()
        # `size.gradients`, not `graphs.gradients`: the captures may have been released since the forward.
        handed = size.gradients.begin(size.learned)
        size.backward.replay()
        size.gradients.end(handed)
        if now is not None:
            graphs.recorder.set_random_state(now)
        embeds_grad = None
        if ctx.needs_input_grad[0]:
            embeds_grad = size.exchange[0][:, : batch.tokens].clone()
        per_layer_grad = None
        if ctx.needs_input_grad[1]:
            per_layer_grad = size.per_layer_grad[:, : batch.tokens].clone()
        return embeds_grad, per_layer_grad, None, None, None, None, None
