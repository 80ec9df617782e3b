"""Mutants of each function that fail a test without hanging, by their index in `mutants`.

`family.find_bugs` finds them. It takes a minute for all functions.
"""

BUGS: dict[str, tuple[int, ...]] = {
    "merge_intervals": (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
    "run_lengths": (*range(15),),
    "moving_average": (0, 1, 2, 3, 4, 5),
    "binary_search": (1, 3, 4, 5, 6, 7, 8, 9, 12),
    "word_wrap": (0, 1, 2, 3, 4, 5, 6, 7),
    "to_roman": (*range(25), 26, 27),
    "second_largest": (0, 1, 2, 3, 4),
    "group_by_length": (0, 1),
    "count_change": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    "edit_distance": (*range(13), *range(14, 38)),
    "rotate_matrix": (0, 2, 3, 4, 5),
    "longest_increasing_run": (0, 1, 2, 3, 4),
}
