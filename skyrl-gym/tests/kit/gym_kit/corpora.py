"""A corpus of three documents, as the lines of a file."""

import json

LINES = "\n".join(
    json.dumps(document)
    for document in (
        {"id": "fuji", "contents": "Mount Fuji is the highest mountain of Japan."},
        {"id": "etna", "title": "Etna", "text": "A volcano in Sicily, the tallest in Italy."},
        {"contents": "The Nile is a river in Africa."},
    )
)
