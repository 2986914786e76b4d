"""The modelserve operator: gather, plan, build manifests, apply, report status."""
