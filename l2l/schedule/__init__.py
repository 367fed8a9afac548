"""A step as text: what happens, in which order, and which lane waits for which.

A schedule is a list of lines, frozen before it runs; the relay performs them and chooses nothing.
Three layers, one microbatch, two slots, before waits are added:

    lookup m0                         the host gathers the embedding rows of microbatch 0
    fetch L0 S0                       weights of layer 0 into slot S0
    fetch L1 S1
    unstash e m0 C0                   the rows, into a cell
    prologue m0 - R0 C0 C1            R0: recorded arguments of the layers. C1: hidden state.
    forward L0 m0 S0 R0 C1 C2 -       reads slot S0 and cell C1, writes cell C2, keeps nothing
    release L0 S0
    fetch L2 S0
    ...
    fetch T0 ST0                      the embedding table, which is the head too
    fetch O SO                        what else is around the layers (final norm)
    epilogue m0 ST0,SO GT0,GO - C4 C5   hidden state in, its gradient out, loss on the way
    report                            the losses leave the device
    drain T0 GT0 HT0                  gradient to the host
    backward L2 m0 S0 G0 R0 C3 - C5 C0  recomputes L2 from C3; gradient in C5, out C0; sums in G0
    drain L2 G0 H0
    update L2 H0                      the optimizer, on the host
    ...
    regress m0 - - C3 C5 C2           the prologue backward; gradients of the rows C5 into C2
    stash x m0 C2
    collect T0 m0 HT0                 the host adds those that no later microbatch has

[Note: outer units] Parameters around the layers are units too: `T0`, `T1`, .. are embedding tables,
`O` is everything else. Each is on the device only in the phases that read it (`OuterUnit`); a table
that the prologue reads by lookup alone need not be there for it at all.

[Note: tail] The last `num_tail` layers are walked with the epilogue, microbatch by microbatch: they
run with graph, the loss follows, they run backward, and nothing of them is stashed or recomputed.
Their weights and gradients have slots of their own (`SL2`, `GL2`) for the whole step. With
`device_state` their optimizer state is on the device as well: the step after settles them there
(`order L2` on the host gives the numbers, `renew L2 SL2 GL2` updates, `mirror` copies the weights
to the host), and they are never fetched again.

[Note: late updates] An update may be left to the next step: the last `num_late` units drained have
staging of their own (`HL0`, `HO`) and no update line; the next schedule begins with `settle L0 HL0`
lines for them, in the order in which it fetches. None late is the *eager* policy: every unit is
updated under the backward passes of the layers before it. All late is *just in time*: nothing is
updated before the whole gradient is known, so it can be clipped by its global norm. Tables that are
looked up are always late, and settled in two parts: `refresh` the rows that this step looks up,
before anything else; `settle` the rest, before the table is fetched.

[Note: halves] Where the forward pass waits for late updates, they are done in two (`halves`):
`advance L0 HL0` changes the weights only, in the order in which layers are fetched; `complete L0
HL0` changes the moments, from the same gradient, under the epilogue and the backward passes, where
the host has nothing else to do. The gradient is overwritten only then: a drain to `HL0` waits. In
two an update moves more bytes, so where backward passes are too short for all moments, layers that
are needed last are updated at once (`num_whole`): their gradients are the first to be overwritten.
Tables are, too (`whole_tables`), where nothing would come between the two.

[Note: shared updates] Where the host is slower than the forward pass under which it must update all
layers, the device does some of these updates (`shared`), over the link that is idle then: `borrow
L3 p0 HL3 W0` copies a piece of layer 3 to the device, weights, gradient and optimizer state;
`rework L3 p0 W0` updates it there; `repay L3 p0 W0` copies weights and state back. To everybody
else this is an update on the host: the fetch of layer 3 waits for it. Shared layers that are not
late are updated under their own step's backward passes. Weights and gradient are on the device
then, so that `lease L3 p0 W0` brings the state alone, and `redo L3 p0 S1 G0 W0` puts them together;
`assign L3` has given the numbers as soon as the loss was known.

[Note: device updates] An optimizer with next to no state runs on the device: `revise L2 S0 G0`
updates the weights in their slot after the last backward pass, and `return L2 S0` copies them to
the host and frees the slot. No gradient leaves the device.

[Note: sharing] With `shares_memory` the epilogue's units and the layers' gradient slots take turns
in the same device memory: `take` and `drop` lines say from when to when a place has any.

[Note: ranks] With several ranks (`parallel`), each holds a share of every unit: `fetch` brings that
to its place in the slot, `gather L0 S0` those of the others; `reduce L0 G0` sums gradients over
ranks before they are drained, each rank its share; `pool` sums losses before they are reported. All
ranks run the same lines, so the lines of these two lanes meet in the same order everywhere.

[Note: lanes] Every verb belongs to a lane (`VERBS`). Lines of one lane happen in order; lines of
different lanes happen whenever they like, unless a wait line orders them: `fetch waits release L0
S0` holds the fetch lane until that line of the compute lane is done. On an accelerator a lane is a
stream and a wait is an event.

[Note: places] Every line reads and writes named places: slots `S`, gradient slots `G`, host staging
`H`, cells `C` (one boundary tensor each), recorded cells `R`, cells `K` for what a forward pass
keeps for its backward pass, host-side values (`h1 m0`: the hidden state entering layer 1 of
microbatch 0; `g1 m0` its gradient; `r m0` the recorded arguments; `e m0` looked-up rows, `x m0`
their gradients). Two lines on different lanes that touch one place, at least one writing, must be
ordered. `add_waits` inserts exactly the waits for which nothing else gives that order, so each of
them matters; a test deletes each in turn and sees the step fail. `validate` checks the finished
text with the same rule.

Lowering: `compute_order` says what is computed; `add_transfers` adds slots, fetches and releases,
gradient slots, drains and updates; `add_stash` gives every boundary tensor a cell and moves what
does not fit to the stash and back; `add_waits` orders the lanes.

The layers of a step are data (`Shape.layers`), not a count: a step may run any increasing sequence.
"""

from l2l.schedule.lines import NOTHING, OUTER, VERBS, Action, Lane, Line, Verb, Wait, parse_line
from l2l.schedule.lowering import (
    NUM_LENT,
    OuterUnit,
    Pass,
    Shape,
    add_stash,
    add_transfers,
    compute_order,
    late_staging,
)
from l2l.schedule.ordering import add_waits
from l2l.schedule.schedule import Schedule, make_schedule, validate
from l2l.schedule.simulation import Cost, Simulation, simulate
from l2l.schedule.trace import Span, Trace

__all__ = [
    "NOTHING",
    "NUM_LENT",
    "OUTER",
    "VERBS",
    "Action",
    "Cost",
    "Lane",
    "Line",
    "OuterUnit",
    "Pass",
    "Schedule",
    "Shape",
    "Simulation",
    "Span",
    "Trace",
    "Verb",
    "Wait",
    "add_stash",
    "add_transfers",
    "add_waits",
    "compute_order",
    "late_staging",
    "make_schedule",
    "parse_line",
    "simulate",
    "validate",
]
