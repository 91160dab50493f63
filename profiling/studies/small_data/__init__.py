"""Parts of the studies of small corpora: effasr and a peer trained on an hour of speech."""
