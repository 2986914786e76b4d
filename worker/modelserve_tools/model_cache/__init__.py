"""`modelserve-worker cache`: the files of a model on a volume that pods of many ModelServes read."""
