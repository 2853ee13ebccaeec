"""A vocabulary read in chunks of equal width, for programs that score or choose ids. Plain integers."""

from __future__ import annotations

__all__ = ["VocabularyChunks"]


class VocabularyChunks:
    """Chunks of `chunk_tokens` ids that cover `real_vocab` ids, and blocks within them.

    Every chunk is whole: the last one ends at the last real id and overlaps the one before where it must, so that
    padding is never read.
    """

    real_vocab: int
    chunk_tokens: int

    @property
    def chunks(self) -> int:
        """Number of chunks that cover the real ids; the last may overlap the one before."""
        return -(-self.real_vocab // self.chunk_tokens)

    @property
    def last_chunk_start(self) -> int:
        """First id of the last chunk."""
        return self.real_vocab - self.chunk_tokens

    @property
    def overlap_tokens(self) -> int:
        """Ids that the last chunk shares with the one before."""
        return self.chunks * self.chunk_tokens - self.real_vocab

    @property
    def block_tokens(self) -> int:
        """Columns of one matmul tile, the unit in which maxima are taken: the widest up to 256 that divides a chunk."""
        return next(width for width in range(256, 0, -32) if self.chunk_tokens % width == 0)

    @property
    def chunk_blocks(self) -> int:
        """Blocks in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def block_columns(self) -> int:
        """Columns of the scratch with one value a block, in whole 32-byte units, which vector tiles need."""
        return -(-self.chunks * self.chunk_blocks // 8) * 8
