"""Which pages of the cache are free, and how many sequences share one."""

from __future__ import annotations

from collections.abc import Iterable


class Pages:
    """Pages are taken for a sequence as a whole, before it begins, so that one that has begun can always end."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        self._free = list(range(n_pages - 1, -1, -1))
        self._n_users = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def n_for(self, n_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-n_tokens // self.page_size)

    def take(self, n: int) -> list[int]:
        """`n` pages for one user; there must be so many."""
        assert n <= self.n_free, "whoever takes pages has looked first"
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._n_users[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more user of these pages."""
        for page in pages:
            self._n_users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One user less; a page without any is free."""
        for page in pages:
            self._n_users[page] -= 1
            if self._n_users[page] == 0:
                self._free.append(page)
