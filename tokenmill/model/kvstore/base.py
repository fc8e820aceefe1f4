"""The contract of a KV store: how the pages of the cache are stored. One file per dtype family.

Pages are per layer slot (see hardware/kv_layout.py): layers of different groups that share a slot share its tensors,
because a page belongs to one group at a time. Knows nothing of requests or of who owns a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import CpuPages
from tokenmill.kernels.host import Device, on_host
from tokenmill.model.kvstore import host_transfer
from tokenmill.model.state.store import StateStore
from tokenmill.types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokenmill.kernels.packed_pages import PackedPages
    from tokenmill.model.kvstore import transfer
    from tokenmill.model.kvstore.conditioning import KeyConditioning
    from tokenmill.model.kvstore.head_sample import HeadSample


class KVStore(ABC):
    name: str
    is_coded: ClassVar[bool] = False  # pages are codes: `pages` and `read` expand them
    on_gpu: ClassVar[bool] = False  # the GPU kernels read and write `stored` or `packed_pages`
    edge_layers: ClassVar[int] = 0  # layers at either end that stay native unless the user says otherwise
    page_multiple: ClassVar[int] = 1  # the page size must be a multiple of this, in tokens
    supports: ClassVar[frozenset[str]] = frozenset()  # of KVLayout.features()

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: Device,
        kernels: str = "",  # noqa: ARG002
        sequences: int = 1,
    ) -> None:
        """`kernels`: forced backend of the op table, or empty. `sequences`: the maximum computed at the same time."""
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self._copy_stream: torch.cuda.Stream | None = None  # for pages that leave
        self._num_state_slots = sequences
        self._states: StateStore | None = None

    @property
    def states(self) -> StateStore:
        """Of recurrent layers: one slot for each sequence, unless `hold_states` made more."""
        if self._states is None:
            self._states = StateStore(self.layout, self._num_state_slots, self.device)
        return self._states

    def hold_states(self, num_slots: int, num_spares: int = 0) -> None:
        self._states = StateStore(self.layout, num_slots, self.device, num_spares)

    @classmethod
    def declines(cls, layout: KVLayout) -> str:
        """Features of this layout that the store does not support, in words; empty if it supports all."""
        return ", ".join(feature for feature in layout.features() if feature not in cls.supports)

    @classmethod
    @abstractmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        """Bytes of one page over all its layers: what the memory model counts."""

    @classmethod
    def fixed_bytes(cls, layout: KVLayout, sequences: int) -> int:  # noqa: ARG003
        """Bytes in addition to the pages, at most: buffers, and what `calibrate` settles."""
        return 0

    def prepare(self, batch: Batch) -> None:  # noqa: B027
        """Called before the first write of a step; for stores that treat recent tokens differently."""

    def as_tensors(self, device: torch.device) -> KVStore:
        """The same pages, of a store of numpy arrays, for torch."""
        raise NotImplementedError(self.name)

    @property
    def conditions_keys(self) -> bool:
        """Whether `condition_keys` would make the codes of keys better."""
        return False

    def condition_keys(self, slot: int, conditioning: KeyConditioning) -> None:
        """Set how the keys of a layer slot are conditioned before rounding; before anything is written to it."""
        raise NotImplementedError(self.name)

    @property
    def calibrates(self) -> bool:
        """Whether `calibrate` would make the codes better."""
        return False

    def calibrate(self, group: int, slot: int, sample: HeadSample) -> None:
        """Settle the codes of the layer at this place; before anything is written."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows [T, kv_heads * head_dim] at `token_slots` (page * page_size + offset) of layer slot `slot`. Of a
        latent layout only `k` is stored, and the pages of V are those of K."""

    @abstractmethod
    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer slot as float tensors [pages, kv_heads, page_size, head_dim]."""

    def read(self, slot: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """As `pages`, of these page numbers (int64) only."""
        k, v = self.pages(slot)
        return k[pages], v[pages]

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer slot as stored, for kernels that read them directly."""
        return self.pages(slot)

    def scales(self, slot: int) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Multipliers of stored K and V, float32 [kv_heads] each; None where the stored numbers are the values."""
        return None

    def kernel_pages(self, slot: int) -> CpuPages | None:  # noqa: ARG002
        """The pages of a layer slot for the C++ kernels; None where these do not support this store or are not
        available."""
        return None

    def gpu_declines(self, slot: int) -> str | None:  # noqa: ARG002
        """Why the GPU kernels do not support the pages of a layer slot, so that torch reads and writes them; None: they
        do."""
        return None if self.on_gpu else f"{self.name} pages have no GPU kernel"

    def packed_pages(self, slot: int) -> PackedPages | None:  # noqa: ARG002
        """The pages of a layer slot for the GPU kernels of quantized rows; None where they are floats or not on a
        GPU."""
        return None

    def meaning(self) -> str:
        """Identifies the encoding of pages: with an equal layout and meaning, stores can exchange pages."""
        return self.name

    @abstractmethod
    def page_tensors(self) -> list[Tensor]:
        """All tensors that hold pages, each with the page as its second dimension: [layer slots, pages, ...].

        Whatever belongs to a page must be in one of them: pages leave for a tier and come back byte by byte.
        """

    @property
    def stored_page_bytes(self) -> int:
        """Bytes of one page as it leaves for a tier."""
        return sum(tensor.nbytes // tensor.shape[1] for tensor in self.page_tensors())

    def export_pages(self, pages: Sequence[int]) -> host_transfer.PagesOnHost | transfer.PagesOnTheWay:
        """Copies of pages, all layers: bytes in host memory, in the order of `page_tensors`. The pages may be
        overwritten by what runs after this call, also where the copies are still on their way."""
        self.before_export(pages)
        tensors: Any = self.page_tensors()
        if on_host(self.device):
            return host_transfer.PagesOnHost([host_transfer.copy_out(tensors, page) for page in pages])
        from tokenmill.model.kvstore import transfer

        if self.device.type != "cuda":
            return transfer.PagesOnHost([transfer.copy_out(tensors, page) for page in pages])
        if self._copy_stream is None:
            import torch

            self._copy_stream = torch.cuda.Stream(self.device)
        return transfer.start_export(tensors, pages, self._copy_stream)

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        """Overwrite pages with what `export_pages` of a store of the same kind and layout returned, in writable
        memory."""
        tensors: Any = self.page_tensors()
        if self.device.type == "cuda":
            from tokenmill.model.kvstore.transfer import start_import

            start_import(tensors, pages, data)
        else:
            copies: Any = host_transfer
            if not on_host(self.device):
                from tokenmill.model.kvstore import transfer as copies
            for page, content in zip(pages, data, strict=True):
                copies.copy_in(tensors, page, content)
        self.after_import(pages)

    def before_export(self, pages: Sequence[int]) -> None:  # noqa: B027
        """Have all of these pages in `page_tensors`; for stores that keep some of them elsewhere for a while."""

    def after_import(self, pages: Sequence[int]) -> None:  # noqa: B027
        """These pages were overwritten in `page_tensors`."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages (source, destination) in every layer: copy-on-write."""
        # In order, one by one: a later pair may copy from an earlier destination.
        for source, destination in pairs:
            for tensor in self.page_tensors():
                tensor[:, destination] = tensor[:, source]

    def move_tokens(self, block_tables: tuple[list[int], ...], first: int, path: list[int]) -> None:
        """Of the tokens stored from index `first` of a sequence on, move those at the offsets `path` (ascending) to the
        front: the accepted branch of a draft tree. For stores whose pages hold a row per token."""
        if path == list(range(len(path))):
            return
        size = self.layout.page_size
        sources = [divmod(first + node, size) for node in path]
        destinations = [divmod(first + depth, size) for depth in range(len(path))]
        for table in block_tables:
            begin, end = (
                ([table[entry] for entry, _ in places], [offset for _, offset in places])
                for places in (sources, destinations)
            )
            for tensor in self.page_tensors():  # [layer slots, pages, kv_heads, page_size, row]
                tensor[:, end[0], :, end[1]] = tensor[:, begin[0], :, begin[1]]

    @property
    @abstractmethod
    def nbytes(self) -> int: ...
