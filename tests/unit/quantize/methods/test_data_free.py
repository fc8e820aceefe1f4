"""The data-free number types: each method's values against their definitions and the peers' packages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.fake_block import FakeBlock, random_weight
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import E2M1_VALUES, NF4_VALUES, QuantizedMatrix, Scheme
from tokenmill.quantize.methods.fp8 import Fp8, compensated_codes, to_float8
from tokenmill.quantize.methods.gptq import column_order, factor_hessian
from tokenmill.quantize.methods.llm_int8 import LlmInt8
from tokenmill.quantize.methods.mx import Microscaling, ocp_scale, to_microscaling
from tokenmill.quantize.methods.nf4 import NormalFloat
from tokenmill.quantize.methods.nvfp4 import NvFp4, to_nvfp4
from tokenmill.quantize.methods.rtn import round_to_nearest
from tokenmill.quantize.schemes import FP8_SCALING

NAMES = ("q", "k", "o")
MXFP4, MXFP8 = Scheme("e2m1", 4, 32, scale_type="e8m0"), Scheme("e4m3", 8, 32, scale_type="e8m0")
NVFP4 = Scheme("e2m1", 4, 16, scale_type="e4m3")


def error(matrix: QuantizedMatrix, weight: Tensor) -> float:
    return float((matrix.dequantize() - weight).square().mean())


def block(inputs: Tensor | None = None) -> FakeBlock:
    weights = {name: random_weight(48, 128, seed) for seed, name in enumerate(NAMES)}
    return FakeBlock(weights, [("q", "k"), ("o",)], inputs)


class TestFp8:
    @pytest.mark.parametrize("scaling", ["channel", "block"])
    def test_peaks_become_the_largest_number(self, scaling: str) -> None:
        view, scheme = block(), FP8_SCALING[scaling]
        before = dict(view.weights)
        for name, matrix in Fp8({"tries": 1}).solve(view, dict.fromkeys(NAMES, scheme)).items():
            weight = before[name]
            assert torch.equal(view.weights[name], matrix.dequantize())
            # e4m3 has three bits after the leading one: half a step is 1/16 of the value, plus the subnormal step
            bound = weight.abs() / 16 + matrix.scales.amax() * 2**-10
            assert ((matrix.dequantize() - weight).abs() <= bound * 1.001).all()
            assert int((matrix.codes & 127).max()) == 126  # 448: some value is the peak of its block
            assert matrix.scales.shape == ((48, 1) if scaling == "channel" else (1, 1))

    @pytest.mark.parametrize("scaling", ["channel", "block"])
    def test_a_scale_within_the_binade_has_less_error(self, scaling: str) -> None:
        weight = random_weight(200, 300)
        peak, searched = (to_float8(weight, FP8_SCALING[scaling], tries=tries) for tries in (1, 16))
        assert error(searched, weight) < (0.9 if scaling == "channel" else 1.0) * error(peak, weight)
        assert bool(((searched.scales >= peak.scales) & (searched.scales < 2 * peak.scales)).all())

    def test_edges_of_blocks_may_be_short(self) -> None:
        weight = random_weight(200, 300)
        matrix = to_float8(weight, FP8_SCALING["block"])
        assert matrix.scales.shape == (2, 3)
        assert matrix.scales[1, 2] == weight[128:, 256:].abs().amax() / 448

    def test_per_tensor_shares_a_scale_and_calibrates_the_input(self) -> None:
        inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)) * 5
        view = block(inputs)
        peak = max(view.weights["q"].abs().amax(), view.weights["k"].abs().amax())
        matrices = Fp8().solve(view, dict.fromkeys(NAMES, FP8_SCALING["tensor"]))
        assert matrices["q"].scales == matrices["k"].scales == peak / 448
        assert matrices["o"].scales != peak / 448
        assert all(m.input_scale == pytest.approx(float(inputs.abs().amax()) / 448) for m in matrices.values())

    @pytest.mark.parametrize("scaling", list(FP8_SCALING))
    def test_compensation_keeps_the_scales_and_lowers_the_error_of_the_output(self, scaling: str) -> None:
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(400, 300, generator=generator) @ torch.randn(300, 300, generator=generator)
        weight, hessian = random_weight(200, 300), inputs.T @ inputs / 400
        plain = to_float8(weight, FP8_SCALING[scaling], tries=4)
        order = column_order(hessian.diagonal(), 0, "static")
        assert order is not None
        codes = compensated_codes(weight, plain, factor_hessian(hessian, 0.01, order)[0], order)
        made_up = QuantizedMatrix(plain.scheme, codes, plain.scales)
        before, after = ((each.dequantize() - weight) @ inputs.T for each in (plain, made_up))
        assert after.norm() < 0.8 * before.norm()
        assert error(made_up, weight) >= error(plain, weight)  # the nearest codes are those of plain rounding

    def test_only_float8(self) -> None:
        with pytest.raises(UserError, match="e4m3"):
            Fp8().check("q", (48, 128), Scheme("int", 4, 128))


class TestMicroscaling:
    @pytest.mark.parametrize(("scheme", "largest"), [(MXFP4, 6.0), (MXFP8, 448.0)])
    def test_scales_follow_the_published_rule(self, scheme: Scheme, largest: float) -> None:
        weight = random_weight(40, 256)
        matrix = to_microscaling(weight, scheme, "ocp")
        peaks = weight.view(40, -1, 32).abs().amax(-1)
        exponent = 2 if scheme.element == "e2m1" else 8
        expected = torch.exp2(torch.floor(torch.log2(peaks)) - exponent)
        assert torch.equal(matrix.scales[peaks > 0], expected[peaks > 0])
        assert bool((matrix.dequantize()[20] == 0).all())
        assert float((matrix.dequantize().view(40, -1, 32).abs() / matrix.scales.unsqueeze(-1)).max()) <= largest

    @pytest.mark.parametrize("scheme", [MXFP4, MXFP8])
    def test_the_other_rule_raises_some_scales_and_best_is_best(self, scheme: Scheme) -> None:
        weight = random_weight(64, 512)
        published, rounded, best = (to_microscaling(weight, scheme, rule) for rule in ("ocp", "ct", "best"))
        ratio = (rounded.scales / published.scales)[weight.view(64, -1, 32).abs().amax(-1) > 0]
        assert set(ratio.tolist()) == {1.0, 2.0}
        assert error(best, weight) <= min(error(published, weight), error(rounded, weight))

    def test_values_match_compressed_tensors(self) -> None:
        """The rule "ct" and the rounding of elements, against the package itself."""
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        weight = random_weight(64, 256)
        settings = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        args = QuantizationArgs(**settings, scale_dtype=torch.uint8, zp_dtype=torch.uint8)
        groups = weight.view(64, -1, 32)
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        ours = to_microscaling(weight, MXFP4, "ct")
        live = groups.abs().amax(-1) > 0
        theirs = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
        assert torch.equal(ours.scales[live], theirs[live])
        values = fake_quantize(weight, theirs, zeros.float() * 0, args)
        assert torch.equal(ours.dequantize().view(64, -1, 32)[live], values.view(64, -1, 32)[live])

    def test_shapes_and_rules_are_checked(self) -> None:
        with pytest.raises(UserError, match="100 inputs"):
            Microscaling().check("q", (8, 100), MXFP4)
        with pytest.raises(UserError, match="ocp"):
            Microscaling({"rule": "opc"}).check("q", (8, 128), MXFP4)

    def test_the_smallest_and_largest_exponents_hold(self) -> None:
        peaks = torch.tensor([0.0, 1e-38, 3e38])
        assert ocp_scale(peaks, 8).tolist() == [2.0**-126, 2.0**-126, 2.0**119]


class TestNvfp4:
    def test_shared_scale_and_exact_float8_scales(self) -> None:
        view = block()
        peak = float(max(view.weights["q"].abs().amax(), view.weights["k"].abs().amax()))
        before = dict(view.weights)
        matrices = NvFp4().solve(view, dict.fromkeys(NAMES, NVFP4))
        assert matrices["q"].global_scale == matrices["k"].global_scale != matrices["o"].global_scale
        assert matrices["q"].global_scale == pytest.approx(peak / (448 * 6))
        for name, matrix in matrices.items():
            assert torch.equal(matrix.scales.to(torch.float8_e4m3fn).float(), matrix.scales)
            assert matrix.input_scale is None
            groups = before[name].view(48, -1, 16)
            # half of the coarsest step (4 to 6) of each group, and what rounding its scale adds
            bound = groups.abs().amax(-1, keepdim=True) / 6 * 1.0625 + 1e-4
            assert ((matrix.dequantize().view_as(groups) - groups).abs() <= bound).all()

    def test_values_match_compressed_tensors(self) -> None:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        weight = random_weight(64, 256)
        groups = weight.view(64, -1, 16)
        settings = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        args = QuantizationArgs(**settings, scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn)
        divisor = generate_gparam(weight.amin(), weight.amax())
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=divisor)
        ours = to_nvfp4(weight, NVFP4, float(weight.abs().amax()))
        live = groups.abs().amax(-1) > 0
        assert torch.equal(ours.scales[live], scales.float()[live])
        values = fake_quantize(weight, scales, zeros, args, global_scale=divisor).view(64, -1, 16)
        torch.testing.assert_close(ours.dequantize().view(64, -1, 16)[live], values[live], rtol=1e-6, atol=0)

    def test_four_over_six_lowers_the_error(self) -> None:
        weight = random_weight(64, 512, outliers=False)
        peak = float(weight.abs().amax())
        plain, better = to_nvfp4(weight, NVFP4, peak), to_nvfp4(weight, NVFP4, peak, four_over_six=True)
        assert error(better, weight) < 0.95 * error(plain, weight)
        assert float(better.scales.max()) <= 448

    def test_rounded_inputs_are_calibrated(self) -> None:
        scheme = Scheme("e2m1", 4, 16, scale_type="e4m3", activations="nvfp4")
        inputs = torch.randn(8, 128)
        matrix = NvFp4().solve(block(inputs), {"o": scheme})["o"]
        assert matrix.input_scale == pytest.approx(float(inputs.abs().amax()) / (448 * 6))


class TestNf4:
    def test_values_match_bitsandbytes(self) -> None:
        functional = pytest.importorskip("bitsandbytes.functional")
        weight = random_weight(48, 256)
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", quant_storage=torch.uint8)
        matrix = NormalFloat().quantize(weight, Scheme("nf4", 4, 64))
        assert torch.equal(matrix.scales.flatten(), state.absmax)
        theirs = functional.dequantize_4bit(packed, state)
        torch.testing.assert_close(matrix.dequantize(), theirs, rtol=1e-6, atol=0)

    def test_less_error_than_symmetric_ints(self) -> None:
        weight = random_weight(48, 512, outliers=False)
        ints = round_to_nearest(weight, Scheme("int", 4, 64))
        assert error(NormalFloat().quantize(weight, Scheme("nf4", 4, 64)), weight) < 0.9 * error(ints, weight)

    def test_codes_are_the_nearest(self) -> None:
        weight = random_weight(8, 64)
        matrix = NormalFloat().quantize(weight, Scheme("nf4", 4, 0))
        table = torch.tensor(NF4_VALUES)
        nearest = (table * matrix.scales.unsqueeze(-1) - weight.unsqueeze(-1)).abs().amin(-1)
        torch.testing.assert_close((matrix.dequantize() - weight).abs(), nearest)

    def test_a_size_that_fits_is_named(self) -> None:
        with pytest.raises(UserError, match="--group-size 32"):
            NormalFloat().check("q", (288, 288), Scheme("nf4", 4, 64))


class TestLlmInt8:
    SCHEME = Scheme("int", 8, activations="llm_int8")

    def test_values_match_bitsandbytes(self) -> None:
        functional = pytest.importorskip("bitsandbytes.functional")
        weight = random_weight(48, 256).half()
        codes, peaks, _ = functional.int8_vectorwise_quant(weight)
        matrix = LlmInt8().quantize(weight.float(), self.SCHEME)
        torch.testing.assert_close(matrix.scales.flatten()[peaks > 0] * 127, peaks[peaks > 0])
        assert float((matrix.codes.short() - 128 != codes.short()).float().mean()) < 1e-3  # its division is in half

    def test_only_rows_of_eight_bits(self) -> None:
        with pytest.raises(UserError, match="8-bit"):
            LlmInt8().check("q", (48, 128), Scheme("int", 4, 128))


def test_four_bit_values_are_those_of_the_type() -> None:
    matrix = to_nvfp4(random_weight(64, 64), NVFP4, 1.0)
    relative = matrix.dequantize().abs() / (matrix.scales.repeat_interleave(16, 1) * matrix.global_scale)
    assert bool(torch.isclose(relative.unsqueeze(-1), torch.tensor(E2M1_VALUES), atol=1e-5).any(-1).all())
