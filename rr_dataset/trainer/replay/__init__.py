"""Replay of recorded routing in a training forward.

Each router keeps computing its logits; only the *choice* of experts is replaced by the recorded one. The weights come from
the live logits of the recorded experts, so gradients flow into the router as ever, and rows without a record are routed live.

What goes wrong elsewhere, and what happens here:

- **Recomputation** (activation checkpointing) calls a router twice, the second time in reverse layer order and, with several
  micro-batches in flight, in an order that the schedule decides. Counting calls gives one layer another's experts, or one
  micro-batch another's. Here rows belong to a layer and to a micro-batch, and a recomputed segment remembers its micro-batch:
  `attach` sees to it for torch.utils.checkpoint, reentrant or not, and for paddle's recompute (which needs
  preserve_rng_state=True, the default). Other checkpointing says `recompute(micro_batch)`, or is an error, never a guess.
- **Forwards and backwards stay inside of `attach`.** A backward outside recomputes with live routing.
- **Forwards without replay** (evaluation, generation) inside of `attach` belong in `paused()`. Neither eval mode nor no_grad tells
  them apart, since log-probabilities of the old policy are computed so, with replay.
- **A forward that ended early** (out of memory, a batch that was skipped) leaves layers at different micro-batches: the next
  `push` refuses until `abandon()` has dropped it.
- **A layer that is never called, a micro-batch that is never taken, a run in which nothing was replayed**: `check_consumed`.
- **Routers behind the spec's last layer** (multi-token prediction) have no record: they stay live, and `attach` warns.
- **Flattening** is [batch * tokens] row-major, padding included. Rows of another count are an error; rows of the right count in
  the wrong order (sequence-major, or shifted by one token) cannot be seen here, but `metrics().agreement` falls to chance:
  watch it. Token ids are compared when a batch is aligned, before it gets here.
- **Padding rows** are routed too. They are not counted; leave them live, or spread over the experts.
- **Sequence parallel** models of PaddleFormers gather tokens before the router: rows are those of the whole sequence. Megatron's
  router sees this rank's part.
- **Expert parallel** blocks of PaddleFormers (DeepEP) and blocks that cut tokens into sub-batches have other routers and are not
  hooked: an error, nothing is replayed in silence. Routers that replay does not know call `choose`, with attach(model, own=True).
- **Load balancing**: losses and biases computed from logits stay live; counts of chosen experts are of the recorded ones.
"""

from rr_dataset.trainer.replay.batch import MicroBatch
from rr_dataset.trainer.replay.replay import ReplayMetrics, RoutingReplay

__all__ = ["MicroBatch", "ReplayMetrics", "RoutingReplay"]
