// Command custom-metrics answers custom.metrics.k8s.io for pods, as a metrics adapter of a cluster does: it reads the
// /metrics of the pods that are asked for when they are asked for, and keeps nothing.
//
// It knows one metric, modelserve_requests: what a worker decodes and what waits at it.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/common/expfmt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/metrics/pkg/apis/custom_metrics"
	basecmd "sigs.k8s.io/custom-metrics-apiserver/pkg/cmd"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"
)

const (
	served   = "modelserve_requests"
	portName = "http"
)

var (
	pods    = schema.GroupResource{Resource: "pods"}
	addends = []string{"vllm:num_requests_running", "vllm:num_requests_waiting"}
	client  = &http.Client{Timeout: 2 * time.Second}
)

func main() {
	adapter := &basecmd.AdapterBase{Name: "custom-metrics"}
	if err := adapter.Flags().Parse(os.Args); err != nil {
		klog.Fatal(err)
	}
	config, err := adapter.ClientConfig()
	if err != nil {
		klog.Fatal(err)
	}
	cluster, err := kubernetes.NewForConfig(config)
	if err != nil {
		klog.Fatal(err)
	}
	adapter.WithCustomMetrics(&workers{cluster})
	if err := adapter.Run(context.Background()); err != nil {
		klog.Fatal(err)
	}
}

type workers struct {
	cluster kubernetes.Interface
}

func (w *workers) ListAllMetrics() []provider.CustomMetricInfo {
	return []provider.CustomMetricInfo{{GroupResource: pods, Namespaced: true, Metric: served}}
}

func (w *workers) GetMetricByName(ctx context.Context, name types.NamespacedName, info provider.CustomMetricInfo,
	_ labels.Selector) (*custom_metrics.MetricValue, error) {
	if info.GroupResource != pods || info.Metric != served {
		return nil, provider.NewMetricNotFoundForError(info.GroupResource, info.Metric, name.Name)
	}
	pod, err := w.cluster.CoreV1().Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	value, err := requests(ctx, pod)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(err.Error())
	}
	return described(pod, value), nil
}

// A pod that does not answer is left out: the autoscaler has a rule of its own for pods without a value.
func (w *workers) GetMetricBySelector(ctx context.Context, namespace string, selector labels.Selector,
	info provider.CustomMetricInfo, _ labels.Selector) (*custom_metrics.MetricValueList, error) {
	if info.GroupResource != pods || info.Metric != served {
		return nil, provider.NewMetricNotFoundError(info.GroupResource, info.Metric)
	}
	found, err := w.cluster.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	list := &custom_metrics.MetricValueList{}
	for index := range found.Items {
		pod := &found.Items[index]
		value, err := requests(ctx, pod)
		if err != nil {
			klog.Infof("%s/%s: %v", pod.Namespace, pod.Name, err)
			continue
		}
		list.Items = append(list.Items, *described(pod, value))
	}
	return list, nil
}

func described(pod *corev1.Pod, value float64) *custom_metrics.MetricValue {
	return &custom_metrics.MetricValue{
		DescribedObject: custom_metrics.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name,
		},
		Metric:    custom_metrics.MetricIdentifier{Name: served},
		Timestamp: metav1.Now(),
		Value:     *resource.NewMilliQuantity(int64(value*1000), resource.DecimalSI),
	}
}

// The sum of the addends, over all their series.
func requests(ctx context.Context, pod *corev1.Pod) (float64, error) {
	port := metricsPort(pod)
	if pod.Status.PodIP == "" || port == 0 {
		return 0, fmt.Errorf("it has no address, or no port named %s", portName)
	}
	address := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(port)))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("/metrics answered %s", answer.Status)
	}
	var parser expfmt.TextParser
	families, err := parser.TextToMetricFamilies(answer.Body)
	if err != nil {
		return 0, err
	}
	var sum float64
	for _, name := range addends {
		family, ok := families[name]
		if !ok {
			return 0, fmt.Errorf("/metrics has no %s", name)
		}
		for _, metric := range family.GetMetric() {
			sum += metric.GetGauge().GetValue()
		}
	}
	return sum, nil
}

func metricsPort(pod *corev1.Pod) int32 {
	for _, container := range pod.Spec.Containers {
		for _, port := range container.Ports {
			if port.Name == portName {
				return port.ContainerPort
			}
		}
	}
	return 0
}
