"""AWQ and GPTQ: codes of inputs before outputs, or in words of inputs."""

from __future__ import annotations

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Parameter, Role
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.mapping.stored_codes import BITS, WORD_BITS, StoredCodes


class InputCodes(StoredCodes):
    """Codes of a matrix whose rows are inputs, or words of inputs."""

    def inputs(self) -> Quantized:
        """Return the tensor, whose rows are inputs."""
        inputs, words = self._matrix()
        bits = self.row.bits or 4
        self._check_bits(bits)
        outputs = words * (WORD_BITS // bits)
        groups, group = self._input_groups(inputs, outputs)
        self.expect(Role.ZERO, (groups, words))
        grid = groups, outputs
        encoding = self.encoding(
            (inputs, outputs),
            bits,
            self.row.values,
            [
                Parameter(Role.SCALE, self.dtypes[Role.SCALE], grid, (group, 1)),
                Parameter(Role.ZERO, self.dtypes[Role.ZERO], grid, (group, 1), bits, self.row.order),
            ],
        )
        shape = outputs, inputs
        return self.quantized(encoding, shape, encoding.shape, (1, 0), shape)

    def input_words(self) -> Quantized:
        """Return the tensor, whose rows are words of inputs."""
        rows, outputs = self._matrix()
        zeros = self.shapes[Role.ZERO]
        if (
            len(zeros) != 2
            or outputs == 0
            or zeros[1] * WORD_BITS % outputs
            or zeros[1] * WORD_BITS // outputs not in BITS
        ):
            raise MappingError(
                f"{self.names[Role.ZERO]!r}: expected shape (groups, {outputs} * bits / 32) for {self.codes!r} of "
                f"shape {self.found} and {', '.join(map(str, BITS))} bits, found {zeros}"
            )
        bits = zeros[1] * WORD_BITS // outputs
        self._check_bits(bits)
        per_word = WORD_BITS // bits
        inputs = rows * per_word
        groups, group = self._input_groups(inputs, outputs)
        self.expect(Role.ZERO, (groups, zeros[1]))
        for scheme in self.settings.of("int", bits):
            self.check_required(scheme)
        permuted = Role.GROUP in self.names and not self.settings.in_order
        if not permuted and group % per_word:
            raise MappingError(
                f"{self.codes!r}: expected groups of whole words of {per_word} inputs, found groups of {group}"
            )
        block = (0, per_word) if permuted else (group // per_word, per_word)
        added = sum(1 << at for at in range(0, WORD_BITS, bits)) if self.settings.zero_added else 0
        parameters = [
            Parameter(Role.SCALE, self.dtypes[Role.SCALE], (groups, outputs), block),
            Parameter(Role.ZERO, self.dtypes[Role.ZERO], (groups, outputs), block, bits, added=added),
        ]
        if Role.GROUP in self.names:
            self.expect(Role.GROUP, (inputs,))
            parameters.append(Parameter(Role.GROUP, self.dtypes[Role.GROUP], (rows, per_word), (1, 0)))
        values = self.row.values.format(bits=bits)
        encoding = self.encoding((rows, outputs * per_word), bits, values, parameters, rows_in_word=per_word)
        kept = outputs, rows, per_word
        return self.quantized(encoding, (outputs, inputs), (rows, outputs, per_word), (1, 0, 2), kept)

    def _matrix(self) -> tuple[int, int]:
        if len(self.found) != 2:
            raise MappingError(f"{self.codes!r}: expected two dimensions, found shape {self.found}")
        return self.found[0], self.found[1]

    def _check_bits(self, bits: int) -> None:
        said = {scheme.bits for scheme in self.settings.schemes if scheme.kind == "int"}
        if said and bits not in said:
            raise MappingError(
                f"{self.codes!r}: expected codes of {shown(said)} bits, as in quantization_config, found {bits}"
            )

    def _input_groups(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return how many groups of inputs there are, and the inputs of each."""
        scale = self.shapes[Role.SCALE]
        groups = scale[0] if len(scale) == 2 else 0
        group = -(-inputs // groups) if groups else 0
        for scheme in self.settings.schemes:
            if scheme.kind == "int" and (scheme.group is not None or scheme.strategy == "channel"):
                group = min(scheme.group or inputs, inputs)
        if scale != (groups, outputs) or group == 0 or -(-inputs // group) != groups:
            sized = f"{inputs} / {group}" if group else "groups"
            raise MappingError(
                f"{self.names[Role.SCALE]!r}: expected shape ({sized}, {outputs}) for {self.codes!r} of shape "
                f"{self.found}, found {scale}"
            )
        return groups, group
