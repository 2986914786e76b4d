module modelserve.dev/tests/cluster/gateway

go 1.26.0

// For their CRDs: nothing is built of them.
require (
	github.com/kedacore/keda/v2 v2.21.0
	sigs.k8s.io/gateway-api v1.6.3
	sigs.k8s.io/gateway-api-inference-extension v1.5.0
)
