"""`python -m skyrl_gym.retrieval --corpus wiki.jsonl`: serve keyword search, or vector search with `--encoder`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_gym.optional import install_command
from skyrl_gym.retrieval.corpus import read_corpus
from skyrl_gym.retrieval.index import Index, VectorIndex, WordIndex

logger = logging.getLogger("skyrl_gym.retrieval")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m skyrl_gym.retrieval", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help='JSON lines of {"id": …, "contents": …}, or .gz')
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--topk", type=int, default=3, help="default number of documents per query")
    parser.add_argument("--encoder", help="a sentence-transformers model, e.g. intfloat/e5-base-v2")
    parser.add_argument("--query_prefix", default="", help='the encoder\'s prefix of queries, e.g. "query: "')
    parser.add_argument("--document_prefix", default="", help='the encoder\'s prefix of documents, e.g. "passage: "')
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        import uvicorn

        from skyrl_gym.retrieval.server import create_app

        documents = read_corpus(options.corpus)
        index: Index
        if options.encoder:
            from sentence_transformers import SentenceTransformer

            encoder = SentenceTransformer(options.encoder)
            index = VectorIndex(documents, encoder, options.query_prefix, options.document_prefix)
        else:
            index = WordIndex(documents)
    except ModuleNotFoundError as error:
        is_encoder = error.name == "sentence_transformers"
        command = "pip install sentence-transformers" if is_encoder else install_command("retrieval")
        sys.exit(f"{error.name} is not installed: {command}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    logger.info("%d documents at http://%s:%d/retrieve", len(documents), options.host, options.port)
    uvicorn.run(
        create_app(index, len(documents), options.topk), host=options.host, port=options.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
