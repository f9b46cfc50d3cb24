package drain

import (
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A Policy makes drain requests for machines. Timeout and MaxEvictRetries are the defaults
// for machines without their own.
type Policy struct {
	Timeout         time.Duration
	MaxEvictRetries int
}

// DefaultPolicy returns the policy of the machine controller manager.
func DefaultPolicy() Policy { return Policy{Timeout: 2 * time.Hour, MaxEvictRetries: 360} }

const (
	// forcedTimeout is enough for a few requests for each pod.
	forcedTimeout = time.Minute
	// unhealthyLimit is how long a Node may be unhealthy before its drain is forced: its
	// kubelet is not expected to end pods any more.
	unhealthyLimit = 5 * time.Minute
	// evictPeriod is the assumed time of one retry.
	evictPeriod = 20 * time.Second
)

const conditionReadonlyFilesystem corev1.NodeConditionType = "ReadonlyFilesystem"

// Request returns how to drain the Node of a machine with a deletion timestamp now, and the
// time after which to call it again even if nothing has changed; 0 means never. Node must
// not be nil. Failed says that the machine is deleted because it was unhealthy.
//
// A drain is forced if the machine's label says so, if the machine's time to drain is over,
// or if the Node has been unhealthy for five minutes.
func (p Policy) Request(
	machine *v1alpha1.Machine, node *corev1.Node, failed bool, now time.Time,
) (req Request, again time.Duration) {
	req = p.request(machine, node)
	req.Failed = failed
	left := p.Left(machine, now)
	if left <= 0 {
		return forced(req), 0
	}
	req.Timeout = left
	since, unhealthy := unhealthySince(node)
	if !unhealthy {
		return req, left
	}
	if untilForced := since.Add(unhealthyLimit).Sub(now); untilForced > 0 {
		return req, min(left, untilForced)
	}
	req.Force = true

	return req, 0
}

// StayRequest is Request for a machine that has been Failed and preserved since a time: its
// Node is emptied and stays. Such a drain is forced if the machine's label says so or if its
// time to drain is over, but not because the Node is unhealthy, which is expected.
func (p Policy) StayRequest(
	machine *v1alpha1.Machine, node *corev1.Node, since, now time.Time,
) (req Request, again time.Duration) {
	req = p.request(machine, node)
	req.Stays = true
	left := since.Add(p.limit(machine)).Sub(now)
	if machine.Labels[v1alpha1.LabelKeyForceDrain] == v1alpha1.LabelValueTrue || left <= 0 {
		return forced(req), 0
	}
	req.Timeout = left

	return req, left
}

// request returns what all drains of the machine's Node have in common.
func (p Policy) request(machine *v1alpha1.Machine, node *corev1.Node) Request {
	retries := p.MaxEvictRetries
	if own := machine.Spec.MaxEvictRetries; own != nil {
		retries = int(*own)
	}

	return Request{
		UID: machine.UID, Machine: types.NamespacedName{Namespace: machine.Namespace, Name: machine.Name},
		Deployment: machine.Labels[v1alpha1.LabelKeyMachineDeployment], Node: node,
		MaxEvictRetries: min(retries, int(p.limit(machine)/evictPeriod)),
	}
}

func forced(req Request) Request {
	req.Force, req.Timeout, req.MaxEvictRetries = true, forcedTimeout, 1

	return req
}

// Left returns the time left for an orderly drain of a machine's Node. At 0 or below the
// machine's deletion does not wait for pods.
func (p Policy) Left(machine *v1alpha1.Machine, now time.Time) time.Duration {
	switch t := machine.DeletionTimestamp; {
	case Forced(machine):
		return 0
	case t == nil:
		return p.limit(machine)
	default:
		return t.Add(p.limit(machine)).Sub(now)
	}
}

func (p Policy) limit(machine *v1alpha1.Machine) time.Duration {
	if own := machine.Spec.MachineDrainTimeout; own != nil {
		return own.Duration
	}

	return p.Timeout
}

// Forced reports whether a machine is to be deleted by force, without regard to the pods on
// its Node.
func Forced(machine *v1alpha1.Machine) bool {
	force, err := strconv.ParseBool(machine.Labels[v1alpha1.LabelKeyForceDeletion])

	return err == nil && force
}

// unhealthySince returns since when the Node has not been ready or its filesystem has been
// read-only. It ignores a condition without a transition time, which may be new.
func unhealthySince(node *corev1.Node) (since time.Time, unhealthy bool) {
	for _, c := range node.Status.Conditions {
		bad := c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue ||
			c.Type == conditionReadonlyFilesystem && c.Status != corev1.ConditionFalse
		if bad && !c.LastTransitionTime.IsZero() && (!unhealthy || c.LastTransitionTime.Time.Before(since)) {
			since, unhealthy = c.LastTransitionTime.Time, true
		}
	}

	return since, unhealthy
}
