package cloudapi

import (
	"context"
	"net/http"
	"net/url"
)

// TagPool is the tag of a pool's instances, with the pool's name.
const TagPool = "virtual-cloud/pool"

// OpPool is the operation of all calls about pools in fault rules, statistics and the log.
const OpPool = "pool"

// Codes of [Error] that only calls about pools return. Nothing was done then.
const (
	// CodeSizeChanged means that the pool does not have the expected size. Status 409.
	CodeSizeChanged = "SizeChanged"
	// CodeOutOfBounds means that the size exceeds the pool's bounds. Status 400.
	CodeOutOfBounds = "OutOfBounds"
)

// A Pool is a group of equal instances, whose number the cloud maintains.
type Pool struct {
	Name        string `json:"name"`
	Min         int32  `json:"min"`
	Max         int32  `json:"max"`
	MachineType string `json:"machineType"`
	Region      string `json:"region"`
	Zone        string `json:"zone,omitempty"`
	// Cluster is the control plane of the instances; empty for any.
	Cluster string `json:"cluster,omitempty"`
	// Size is the number of instances without those being deleted. A call that defines a
	// pool does not change it.
	Size int32 `json:"size"`
}

// A PoolInstance is an instance that a pool has or will have.
type PoolInstance struct {
	// Slot is its name in the pool, even before it exists, and the instance's name.
	Slot string `json:"slot"`
	// Instance is nil until the instance exists.
	Instance *Instance `json:"instance,omitempty"`
	// Code and Message are the reason why the instance could not be created.
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
}

// PoolList is the answer to a list of pools.
type PoolList struct {
	Pools []Pool `json:"pools"`
}

// PoolInstances is the answer to a list of one pool's instances.
type PoolInstances struct {
	Instances []PoolInstance `json:"instances"`
}

// A ResizeRequest changes a pool's size from Expected to Size. A RequestID that was done
// before changes nothing. A smaller Size removes slots without an instance.
type ResizeRequest struct {
	RequestID string `json:"requestID"`
	Expected  int32  `json:"expected"`
	Size      int32  `json:"size"`
}

// A RemoveRequest deletes all or none of some instances of a pool, given as slots or
// provider ids, and lowers its size. Instances that are gone or being deleted are ignored.
type RemoveRequest struct {
	Instances []string `json:"instances"`
}

// Pools returns all pools, sorted by name.
func (c *Client) Pools(ctx context.Context) ([]Pool, error) {
	list, err := call[PoolList](ctx, c.conn, http.MethodGet, "/v1/pools", nil)
	if err != nil {
		return nil, err
	}

	return list.Pools, nil
}

// PutPool creates or replaces the definition of a pool, and keeps its instances.
func (c *Client) PutPool(ctx context.Context, pool Pool) (*Pool, error) {
	return call[Pool](ctx, c.conn, http.MethodPut, poolPath(pool.Name, ""), pool)
}

// PoolInstances returns the slots of a pool.
func (c *Client) PoolInstances(ctx context.Context, pool string) ([]PoolInstance, error) {
	list, err := call[PoolInstances](ctx, c.conn, http.MethodGet, poolPath(pool, "/instances"), nil)
	if err != nil {
		return nil, err
	}

	return list.Instances, nil
}

// ResizePool sets a pool's size.
func (c *Client) ResizePool(ctx context.Context, pool string, req ResizeRequest) (*Pool, error) {
	return call[Pool](ctx, c.conn, http.MethodPost, poolPath(pool, "/resize"), req)
}

// RemoveFromPool deletes instances of a pool.
func (c *Client) RemoveFromPool(ctx context.Context, pool string, req RemoveRequest) (*Pool, error) {
	return call[Pool](ctx, c.conn, http.MethodPost, poolPath(pool, "/remove"), req)
}

func poolPath(name, rest string) string { return "/v1/pools/" + url.PathEscape(name) + rest }
