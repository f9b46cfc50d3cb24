package autoscaler

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// A Config has a Server's dependencies and settings.
type Config struct {
	// Control reads the objects of machines from a cache, without indexes, and writes them.
	Control client.Client
	// Live reads them from the API server, after a conflict.
	Live client.Reader
	// Nodes reads the Nodes of the target cluster from a cache.
	Nodes client.Reader
	// Events records Events on MachineDeployments with invalid annotations.
	Events record.EventRecorder
	// Groups are node groups whatever their annotations say.
	Groups []Group
	// Provided are the groups that drivers serve over the bus; may be nil.
	Provided *Provided
	// Marks is the format that names machines to delete.
	Marks Marks
	// GPULabel is the label of nodes with GPUs; may be empty.
	GPULabel string
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// A Server answers the cluster-autoscaler. It is safe for concurrent use; the
// caches it reads must be synced.
type Server struct {
	externalgrpc.UnimplementedCloudProviderServer

	cfg  Config
	last atomic.Pointer[snapshot]

	taking sync.Mutex // one snapshot at a time; locked before mu

	mu       sync.Mutex
	locks    map[string]*groupLock                            // by group; one write at a time
	written  map[client.ObjectKey]*v1alpha1.MachineDeployment // our writes that the caches may not have seen yet
	reported map[client.ObjectKey]map[string]string           // faults with an Event, by reason
	missing  map[client.ObjectKey]bool                        // configured groups without a deployment
}

// New returns a Server.
func New(cfg Config) *Server {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	return &Server{
		cfg: cfg, locks: map[string]*groupLock{}, written: map[client.ObjectKey]*v1alpha1.MachineDeployment{},
		reported: map[client.ObjectKey]map[string]string{}, missing: map[client.ObjectKey]bool{},
	}
}

// Refresh takes a new snapshot.
func (s *Server) Refresh(ctx context.Context, _ *externalgrpc.RefreshRequest) (*externalgrpc.RefreshResponse, error) {
	if _, err := s.take(ctx); err != nil {
		return nil, err
	}
	if s.cfg.Provided != nil {
		s.cfg.Provided.kick() // for the loop after this one
	}

	return &externalgrpc.RefreshResponse{}, nil
}

// Cleanup does nothing: other cluster-autoscalers may go on.
func (s *Server) Cleanup(context.Context, *externalgrpc.CleanupRequest) (*externalgrpc.CleanupResponse, error) {
	return &externalgrpc.CleanupResponse{}, nil
}

// maxAge is how long a snapshot is used without a Refresh. The cluster-autoscaler sends one in
// each loop, about every ten seconds, but only to one replica. After a reconnect within a loop
// it may talk to another one.
const maxAge = 30 * time.Second

// current returns the last snapshot, or takes a new one if there is none or if it is too old.
// The cluster-autoscaler asks before its first Refresh.
func (s *Server) current(ctx context.Context) (*snapshot, error) {
	recent := func() *snapshot {
		if last := s.last.Load(); last != nil && s.cfg.Now().Sub(last.taken) <= maxAge {
			return last
		}

		return nil
	}
	if last := recent(); last != nil {
		return last, nil
	}
	s.taking.Lock()
	defer s.taking.Unlock()
	if last := recent(); last != nil { // another call has taken it meanwhile
		return last, nil
	}

	return s.takeLocked(ctx)
}

// group finds a group by its id.
func (s *Server) group(ctx context.Context, id string) (*group, error) {
	now, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	g, ok := now.byID[id]
	if !ok {
		return nil, status.Errorf(codes.NotFound,
			"there is no node group %q: its MachineDeployment was deleted, or its node group annotations were removed", id)
	}

	return g, nil
}
