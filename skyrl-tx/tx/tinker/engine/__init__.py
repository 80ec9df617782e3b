"""The process that owns the backend: it takes requests from the database, computes, and writes what came of them.

What a request goes through: a route reads it, a `Submission` checks it and writes its row, and the client gets a
promise, the row's number. The server rings. The engine's `Queue` takes the row: those of a model in their order,
samples as users and their sessions take turns. `Passes` and `Sampling` do theirs a little at a time, beside each other;
`Handlers` do all others at once. What comes of it is an `Outcome`, which is written into the row together with whatever
is true from then on. The engine rings, and the server's `Promises` wake those who wait for that row.
"""
