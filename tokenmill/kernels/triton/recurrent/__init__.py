"""Recurrent layers: the ops of kernels/ref_recurrent.py, with the same signatures.

  convolution.py  causal convolution of each channel, which keeps the last inputs of a sequence
  mamba.py        the selective scan of Mamba: a state for each channel
  mamba2.py       the scan of Mamba 2: a state matrix for each head, products of whole chunks
  delta.py        the gated delta rule: likewise, the updates of a chunk solved for at once
  gated_norm.py   RMS norm over groups, gated before or after
  choose.py       the tiles of the scans, by shape; the only place that picks them
  sequences.py    which rows belong to which sequence and state slot, softplus: what all of them share

Each op has two kernels: one for steps in which every sequence has one row (as many rows as sequences), one that goes
over the rows of each sequence in chunks with its state in registers. Sums are float32, states too; rows are bf16 or
float32 and may be columns of a wider tensor. A state is read from `slots` and written to `targets`, the same slots
where none are given; a sequence with slot -1 begins with zeros and leaves nothing. Rows of no sequence, at the end of
a padded step, come out finite. Steps whose states go to other slots than they are read from can convolve and scan in
one launch (`convolution`): programs that share channels all read the old inputs, and one writes the new ones. Shapes
alone decide a launch.
"""
