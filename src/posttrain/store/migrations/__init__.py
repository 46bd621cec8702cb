"""The metadata database's history, one file a change; run by `posttrain.store.upgrade.migrate`."""
