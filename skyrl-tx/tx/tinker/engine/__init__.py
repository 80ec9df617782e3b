"""The process that owns the backend. It takes requests from the database, computes, and writes the results back.

The path of a request: a route parses it, a `Submission` checks it and writes its row, and the client gets a promise,
the row's number. The server rings. The engine's `Queue` takes the row: requests of a model in order, samples by turns
of users and their sessions. `Passes` and `Sampling` run incrementally and interleave. `Handlers` run all other
requests in one go. The `RequestOutcome` is written to the row together with everything it changes. The engine rings,
and the server's `Promises` wake the clients that wait for the row.
"""
