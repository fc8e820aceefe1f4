"""Small fine-tuning on one device: low-rank adapters on a frozen base in its stored format, written as PEFT adapters.

data.py packs texts into rows, model.py computes losses with gradients (ops.py), state.py keeps what a killed run
continues from, job.py has the order of things. Called by `tokenmill finetune`.
"""
