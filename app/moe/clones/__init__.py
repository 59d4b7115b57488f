"""Expert replicas ("clones", ECHO's word for them).

A clone is a copy of a hot expert's weights in a spare slot of another rank, for one microbatch of
one layer. `app.moe.echo` plans clones from the routed counts. Forward sends weights from the
expert's owner rank to the slots, and the slots compute a part of the expert's tokens. Backward
sends the weights again, since all layers and microbatches share the slots, and returns the fp32
weight gradients to the owner rank, which adds them to its main gradient. Clones have no optimizer
state and are never saved.
"""
