"""The closed loop: predict, quantize, prove, measure, choose, write the artefact and the report."""
