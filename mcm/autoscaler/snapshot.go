package autoscaler

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// Reasons of Events on a MachineDeployment whose mark as a node group cannot be
// read, whose options as one make no sense, whose annotations on what its nodes have
// cannot be read, or of which nothing says what they have.
const (
	EventInvalidNodeGroup    = "InvalidNodeGroup"
	EventInvalidOption       = "InvalidNodeGroupOption"
	EventInvalidNodeTemplate = "InvalidNodeTemplate"
	EventNoNodeTemplate      = "NoNodeTemplate"
)

// A snapshot is what the answers of one loop of the cluster-autoscaler are taken
// from, so that they agree. It is never changed.
type snapshot struct {
	taken  time.Time
	groups []*group // MachineDeployments, by id
	byID   map[string]*group
	// The machines of all groups, by the names that the cluster-autoscaler has for
	// them.
	byPlaceholder, byProviderID, byNodeName map[string]*machine
	provided                                *providedSnapshot // groups of drivers
}

// A group is a node group.
type group struct {
	id         string
	min, max   int32
	options    dispatch.NodeGroupOptions
	deployment *v1alpha1.MachineDeployment // from a cache: read only
	marked     map[string]bool             // machines that the deployment names to be deleted
	machines   []*machine
}

// A machine is one that belongs to a group.
type machine struct {
	*v1alpha1.Machine // from a cache: read only

	group string
	node  *corev1.Node // nil as long as it has not joined
}

// upcomingPrefix begins the names of nodes that the cluster-autoscaler makes up for
// machines to come, some of them as copies of Nodes that are there, with their ids.
const upcomingPrefix = "template-node-for-"

// placeholderPrefix begins the id of an instance that has not joined: the
// cluster-autoscaler needs one at once.
const placeholderPrefix = "requested://"

func (m *machine) placeholder() string { return placeholderPrefix + m.Namespace + "/" + m.Name }

// instanceID must be what the Node says, to the letter, or the cluster-autoscaler
// takes the instance for one that never joins.
func (m *machine) instanceID() string {
	if m.node != nil && m.node.Spec.ProviderID != "" {
		return m.node.Spec.ProviderID
	}

	return m.placeholder()
}

// posedAs tells that a node with the machine's provider id is none of its own: kubelets
// choose what they say there, and to remove such a node, idle perhaps, would remove the
// machine, in use perhaps. What the cluster-autoscaler makes up has no Node: it goes by
// the id in both fields, or is a copy.
func (m *machine) posedAs(providerID, name string) bool {
	return m.node != nil && name != m.node.Name && name != "" && name != providerID && !strings.HasPrefix(name, upcomingPrefix)
}

// going tells that the machine is being deleted, or will be.
func (g *group) going(m *v1alpha1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() || m.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating ||
		g.marked[m.Name] || m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime] != ""
}

// take makes a snapshot and keeps it. The caches hold everything: it costs no
// request.
func (s *Server) take(ctx context.Context) (*snapshot, error) {
	s.taking.Lock() // or of two the older one might be kept
	defer s.taking.Unlock()

	return s.takeAlone(ctx)
}

// takeAlone is take with s.taking held.
func (s *Server) takeAlone(ctx context.Context) (*snapshot, error) {
	taken := s.cfg.Now()
	var deployments v1alpha1.MachineDeploymentList
	var sets v1alpha1.MachineSetList
	var machines v1alpha1.MachineList
	var nodes corev1.NodeList
	for _, read := range []struct {
		client.Reader

		into client.ObjectList
	}{
		// What is owned before its owner, which so is there, and machines before their Nodes.
		{s.cfg.Control, &machines},
		{s.cfg.Control, &sets},
		{s.cfg.Control, &deployments},
		{s.cfg.Nodes, &nodes},
	} {
		if err := read.List(ctx, read.into, client.UnsafeDisableDeepCopy); err != nil {
			return nil, status.Errorf(codes.Unavailable, "read %T from the cache: %v", read.into, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := &snapshot{
		taken: taken, provided: s.cfg.Provided.snapshot(),
		byID: map[string]*group{}, byPlaceholder: map[string]*machine{}, byProviderID: map[string]*machine{}, byNodeName: map[string]*machine{},
	}
	byUID := map[types.UID]*group{} // of deployments, and of their sets
	stored := map[client.ObjectKey]bool{}
	for i := range deployments.Items {
		d := s.newest(&deployments.Items[i])
		stored[client.ObjectKeyFromObject(d)] = true
		if g := s.groupOf(ctx, d); g != nil {
			now.groups, now.byID[g.id], byUID[d.UID] = append(now.groups, g), g, g
		}
	}
	for _, g := range s.cfg.Groups {
		if !stored[g.Deployment] && !s.missing[g.Deployment] {
			klog.FromContext(ctx).Info("a node group of the configuration is not there", "machineDeployment", g.Deployment)
		}
		s.missing[g.Deployment] = !stored[g.Deployment]
	}
	maps.DeleteFunc(s.written, func(key client.ObjectKey, _ *v1alpha1.MachineDeployment) bool { return !stored[key] })
	maps.DeleteFunc(s.told, func(key client.ObjectKey, _ map[string]string) bool { return !stored[key] })
	for i := range sets.Items {
		if owner := metav1.GetControllerOfNoCopy(&sets.Items[i]); owner != nil && byUID[owner.UID] != nil {
			byUID[sets.Items[i].UID] = byUID[owner.UID]
		}
	}
	index := indexNodes(nodes.Items)
	for i := range machines.Items {
		m := &machines.Items[i]
		if owner := metav1.GetControllerOfNoCopy(m); owner != nil && byUID[owner.UID] != nil {
			now.add(byUID[owner.UID], m, index.of(m))
		}
	}
	slices.SortFunc(now.groups, func(a, b *group) int { return strings.Compare(a.id, b.id) })
	s.last.Store(now)

	return now, nil
}

func (sn *snapshot) add(g *group, m *v1alpha1.Machine, node *corev1.Node) {
	one := &machine{Machine: m, group: g.id, node: node}
	g.machines = append(g.machines, one)
	sn.byPlaceholder[one.placeholder()] = one
	if m.Spec.ProviderID != "" {
		sn.byProviderID[m.Spec.ProviderID] = one
	}
	if node == nil {
		return
	}
	sn.byNodeName[node.Name] = one
	if node.Spec.ProviderID != "" {
		sn.byProviderID[node.Spec.ProviderID] = one
	}
}

// newest returns our own last write of a deployment as long as the cache has not
// seen it. s.mu is held.
func (s *Server) newest(cached *v1alpha1.MachineDeployment) *v1alpha1.MachineDeployment {
	key := client.ObjectKeyFromObject(cached)
	ours, ok := s.written[key]
	if !ok {
		return cached
	}
	order, err := resourceversion.CompareResourceVersion(ours.ResourceVersion, cached.ResourceVersion)
	if err != nil || order <= 0 || ours.UID != cached.UID {
		delete(s.written, key)

		return cached
	}

	return ours
}

// wrote has a deployment that was just stored, or read from storage, seen at once:
// the cluster-autoscaler reads what it wrote within a loop.
func (s *Server) wrote(ctx context.Context, d *v1alpha1.MachineDeployment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written[client.ObjectKeyFromObject(d)] = d
	before := s.last.Load()
	if before == nil {
		return
	}
	now := *before
	now.byID = maps.Clone(before.byID)
	now.groups = slices.Clone(before.groups)
	id := groupID(client.ObjectKeyFromObject(d))
	i := slices.IndexFunc(now.groups, func(g *group) bool { return g.id == id })
	if i < 0 {
		return
	}
	g := s.groupOf(ctx, d)
	if g == nil {
		return // no group any more: the next snapshot says so, for all answers alike
	}
	g.machines = now.groups[i].machines
	now.groups[i], now.byID[id] = g, g
	s.last.Store(&now)
}

func groupID(key client.ObjectKey) string { return key.Namespace + "/" + key.Name }

// groupOf returns the group that a deployment is; nil for none. s.mu is held.
func (s *Server) groupOf(ctx context.Context, d *v1alpha1.MachineDeployment) *group {
	if !d.DeletionTimestamp.IsZero() {
		return nil
	}
	lower, upper, ok, err := s.sizes(d)
	s.tell(ctx, d, EventInvalidNodeGroup, "The cluster-autoscaler does not see it: %v", err)
	if !ok {
		return nil
	}
	own, err := ownOptions(d.Annotations)
	s.tell(ctx, d, EventInvalidOption, "The cluster-autoscaler's own settings hold: %v", err)
	_, err = templateNode(d, nil)
	s.tell(ctx, d, EventInvalidNodeTemplate, "The cluster-autoscaler cannot add its first node: %v", err)
	g := &group{id: groupID(client.ObjectKeyFromObject(d)), min: lower, max: upper, options: own, deployment: d, marked: map[string]bool{}}
	for _, name := range markedMachines(d) {
		g.marked[name] = true
	}

	return g
}

// tell says what is wrong with a deployment as a node group, once for each reason;
// with no error, that nothing is any more. s.mu is held.
func (s *Server) tell(ctx context.Context, d *v1alpha1.MachineDeployment, reason, format string, err error) {
	key := client.ObjectKeyFromObject(d)
	if err == nil {
		delete(s.told[key], reason)

		return
	}
	if s.told[key][reason] == err.Error() {
		return
	}
	if s.told[key] == nil {
		s.told[key] = map[string]string{}
	}
	s.told[key][reason] = err.Error()
	klog.FromContext(ctx).Info("a machine deployment is faulty as a node group", "machineDeployment", key, "reason", reason, "err", err.Error())
	s.cfg.Events.Eventf(d, corev1.EventTypeWarning, reason, format, err)
}

// nodeIndex finds Nodes.
type nodeIndex struct{ byName, byProviderID map[string]*corev1.Node }

func indexNodes(nodes []corev1.Node) nodeIndex {
	index := nodeIndex{map[string]*corev1.Node{}, map[string]*corev1.Node{}}
	for i := range nodes {
		index.byName[nodes[i].Name] = &nodes[i]
		if id := nodes[i].Spec.ProviderID; id != "" {
			index.byProviderID[id] = &nodes[i]
		}
	}

	return index
}

// of returns the Node of a machine, nil if it has not joined.
func (i nodeIndex) of(m *v1alpha1.Machine) *corev1.Node {
	if node := i.byName[m.Labels[v1alpha1.LabelKeyNode]]; node != nil && mayBeOf(m, node) {
		return node
	}

	return i.byProviderID[m.Spec.ProviderID]
}

// mayBeOf tells the machine's Node from that of another instance, which had its
// name before.
func mayBeOf(m *v1alpha1.Machine, node *corev1.Node) bool {
	return node.Spec.ProviderID == "" || m.Spec.ProviderID == "" || v1alpha1.SameInstance(node.Spec.ProviderID, m.Spec.ProviderID)
}

// find returns the machine behind a node of the cluster-autoscaler's; nil if it is
// of none of the groups. One that has not joined goes by its placeholder.
func (sn *snapshot) find(providerID, name string) *machine {
	if m := sn.byPlaceholder[providerID]; m != nil {
		return m
	}
	if m := sn.byProviderID[providerID]; m != nil {
		if m.posedAs(providerID, name) {
			return nil
		}

		return m
	}
	if m := sn.byPlaceholder[name]; m != nil {
		return m
	}
	m := sn.byNodeName[name]
	if m == nil || providerID != "" && m.node.Spec.ProviderID != "" {
		return nil // another Node of that name, made anew
	}

	return m
}
