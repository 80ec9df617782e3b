"""Allocation of cache pages, with reference counts."""

from collections.abc import Iterable


class Pages:
    """A page allocator. A sequence gets all of its pages before it starts, so it can always finish."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        self._free = list(range(n_pages - 1, -1, -1))
        self._n_users = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def n_pages_for(self, n_tokens: int) -> int:
        """Return the number of pages that `n_tokens` need."""
        return -(-n_tokens // self.page_size)

    def take(self, n: int) -> list[int]:
        """Allocate `n` pages. The caller has checked that they are free."""
        assert n <= self.n_free, "the caller checks that enough pages are free"
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._n_users[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._n_users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page, and free pages without references."""
        for page in pages:
            self._n_users[page] -= 1
            if self._n_users[page] == 0:
                self._free.append(page)
