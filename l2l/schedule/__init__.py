"""A step as text: what happens, in which order, and which lane waits for which.

A schedule is a list of lines, frozen before it runs; the relay performs them and chooses nothing.
Three layers, one microbatch, two slots, before waits are added:

    lookup m0                           the host gathers the embedding rows of microbatch 0
    fetch L0 S0                         weights of layer 0 into slot S0
    fetch L1 S1
    fetch e m0 C0                       the rows, into a cell
    forward Pro m0 - R0 C0 C1           R0: recorded arguments of the layers. C1: hidden state.
    forward L0 m0 S0 R0 C1 C2 -         reads slot S0 and cell C1, writes cell C2, keeps nothing
    release L0 S0
    fetch L2 S0
    ...
    fetch T0 ST0                        the embedding table, which is the head too
    fetch O SO                          what else is around the layers (final norm)
    loss m0 ST0,SO GT0,GO - C4 C5       hidden state in, its gradient out, loss on the way
    drain loss                          the losses leave the device
    drain T0.grad GT0 HT0               gradient to the host
    backward L2 m0 S0 G0 R0 C3 - C5 C0  recomputes L2 from C3; gradient in C5, out C0; sums in G0
    drain L2.grad G0 H0
    update L2 host H0                   the optimizer, on the host
    ...
    backward Pro m0 - - - C5 - C3 C2    the prologue backward; gradients of the rows C5 into C2
    drain x m0 C2
    collect T0 m0 HT0                   the host adds those that no later microbatch has

[Note: outer units] Parameters around the layers are units too: `T0`, `T1`, .. are embedding tables,
`O` is everything else. Each is on the device only in the phases that read it (`OuterUnit`); a table
that the prologue reads by lookup alone need not be there for it at all.

[Note: tail] The last `num_tail` layers are walked with the loss, microbatch by microbatch: they run
with graph, the loss follows, they run backward, and nothing of them is stashed or recomputed. Their
weights and gradients have slots of their own (`SL2`, `GL2`) for the whole step. With `device_state`
their optimizer state is on the device as well: the step after updates them there (`order L2 late`
on the host gives the coefficients, `update L2 device SL2 GL2 late` follows, `drain L2 SL2` copies
the weights to the host), and they are never fetched again.

[Note: late updates] An update may be left to the next step: the last `num_late` units drained have
staging of their own (`HL0`, `HO`) and no update line; the next schedule begins with `update L0 host
HL0 late` lines for them, in the order in which it fetches. None late is the *eager* policy: every
unit is updated under the backward passes of the layers before it. All late is *just in time*:
nothing is updated before the whole gradient is known, so it can be clipped by its global norm.
Tables that are looked up are always late, and updated in two parts: `update T0:m0 host HT0 late`,
the rows that a microbatch looks up, before anything else; then the rest, before it is fetched.

[Note: halves] Where the forward pass waits for late updates, they are done in two (`halves`): `..
late weights` changes the weights only, in the order in which layers are fetched; `.. late moments`
changes the moments, from the same gradient, under the loss and the backward passes, where the host
has nothing else to do. The gradient is overwritten only then: a drain to `HL0` waits. In two an
update moves more bytes, so where backward passes are too short for all moments, layers that are
needed last are updated at once (`num_whole`): their gradients are the first to be overwritten.

[Note: shared updates] Where the host is slower than the forward pass under which it must update all
layers, the device does some of these updates (`shared`), over the link that is idle then: `fetch
L3.all:p0 HL3 W0` copies a piece of layer 3 to the device, weights, gradient and optimizer state;
`update L3:p0 device W0 late` updates it there; `drain L3.all:p0 W0` copies weights and state back.
To everybody else this is an update on the host: the fetch of layer 3 waits for it. Shared layers
that are not late are updated under their own step's backward passes. Weights and gradient are on
the device then, so that `fetch L3.state:p0 W0` brings the state alone, and `update L3:p0 device S1
G0 W0` puts them together; `order L3` has given the coefficients as soon as the loss was known.

[Note: device updates] An optimizer with next to no state runs on the device: `update L2 device S0
G0` updates the weights in their slot after the last backward pass, and `drain L2 S0 free` copies
them to the host and frees the slot. No gradient leaves the device.

[Note: disk] Optimizer state, and what completes masters, of some layers may be on disk (`on_disk`):
further from the device than the host, so it is fetched from there and drained to there, on two
lanes of their own. `fetch L3.state B0` reads it into a buffer of the host ahead of the update,
`update L3 host H0 B0` works there, `drain L3.state B0` writes it behind. Buffers are used in turns.
Such layers are updated at once, never in halves: each byte is read and written once a step.
Weights may be on disk, too (`weights_on_disk`): `fetch L3.weights D0`, and from there to the device
with `fetch L3 S0 D0`; the update changes them in their buffer, `update L3 host H0 B0 D0`, and
`drain L3.weights D0` writes them. They stay in a buffer until others need it.

[Note: sharing] With `shares_memory` the loss's units and the layers' gradient slots take turns in
the same device memory: `take` and `release` lines say from when to when a place has any.

[Note: ranks] With several ranks (`parallel`), each holds a share of every unit: `fetch` brings that
to its place in the slot, `gather L0 S0` those of the others; `reduce L0 G0` sums gradients over
ranks before they are drained, each rank its share; `reduce loss` sums losses. All ranks run the
same lines, so the lines of these two lanes meet in the same order everywhere.

[Note: lanes] Every kind of line belongs to a lane (`KINDS`). Lines of one lane happen in order;
lines of different lanes happen whenever they like, unless a wait line orders them: `fetch waits
release L0 S0` holds the fetch lane until that line of the compute lane is done. On an accelerator a
lane is a stream and a wait is an event. Waits for earlier steps are lines as well: `fetch waits
last L0` ([Note: steps] in ordering.py).

[Note: places] Every line reads and writes named places: slots `S`, gradient slots `G`, host staging
`H`, cells `C` (one boundary tensor each), recorded cells `R`, cells `K` for what a forward pass
keeps for its backward pass, places `W` for lent optimizer state, host buffers `B` for such state of
the disk, `D` for weights of the disk, what lies there itself (`L3.state`, `L3.weights`), and
boundary tensors on the host
(`h1 m0`: the hidden state entering layer 1 of microbatch 0; `g1 m0` its gradient; `r m0` the
recorded arguments; `k1 m0` what was kept; `e m0` looked-up rows, `x m0` their gradients). Two lines
on different lanes that touch one place, at least one writing, must be ordered. `add_waits` inserts
exactly the waits for which nothing else gives that order, so each of them matters; a test deletes
each in turn and sees the step fail. `validate` checks the finished text with the same rule.

Lowering: `compute_order` (passes.py) says what is computed; `add_transfers` (transfers.py) adds
slots, fetches and releases, gradient slots, drains and updates; `add_disk` (disk.py) reads and
writes state around updates; `add_stash` (cells.py) gives every boundary tensor a cell and moves
what does not fit to the host and back; `add_waits` (ordering.py) orders the lanes.

The layers of a step are data (`Shape.layers`), not a count: a step may run any increasing sequence.
"""

from l2l.schedule.lines import (
    EPILOGUE,
    KINDS,
    LASTING,
    NOTHING,
    OUTER,
    VERBS,
    Action,
    Lane,
    Line,
    Wait,
    WaitLast,
    action,
    parse_line,
)
from l2l.schedule.passes import carried as carried
from l2l.schedule.passes import recorded
from l2l.schedule.schedule import Schedule, lower, make_schedule, validate
from l2l.schedule.shape import NUM_HEAD_CELLS, OuterUnit, Shape, late_staging
from l2l.schedule.trace import Span, Trace
from l2l.schedule.transfers import NUM_LENT
