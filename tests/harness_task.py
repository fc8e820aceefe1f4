"""A task of the lm-eval harness over local items: FILE stands for their path. For tests in two environments."""

from __future__ import annotations

TASK = """
task: local_arc
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}\\nAnswer:"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
