package cloudapi

import (
	"context"
	"net/http"
	"net/url"
)

// TagPool is the tag of a pool's instances, with the pool's name.
const TagPool = "virtual-cloud/pool"

// OpPool is every call about pools, as fault rules, statistics and the log name
// them.
const OpPool = "pool"

// Codes of [Error] that only calls about pools have.
const (
	// CodeSizeChanged: the pool has another size than the caller expects. Nothing
	// was done. Status 409.
	CodeSizeChanged = "SizeChanged"
	// CodeOutOfBounds: the size would leave the pool's bounds. Nothing was done. Status 400.
	CodeOutOfBounds = "OutOfBounds"
)

// A Pool is a group of like instances of which the cloud keeps a number.
type Pool struct {
	Name        string `json:"name"`
	Min         int32  `json:"min"`
	Max         int32  `json:"max"`
	MachineType string `json:"machineType"`
	Region      string `json:"region"`
	Zone        string `json:"zone,omitempty"`
	// Cluster is whose nodes the instances become; empty for anybody's.
	Cluster string `json:"cluster,omitempty"`
	// Size is how many instances the cloud keeps, without those being deleted. A
	// call that defines a pool does not change it.
	Size int32 `json:"size"`
}

// A PoolInstance is one that a pool has, or is to have.
type PoolInstance struct {
	// Slot is its name in the pool, from the moment on that it is wished for. It is
	// the name of the instance as well.
	Slot string `json:"slot"`
	// Instance is missing as long as there is none.
	Instance *Instance `json:"instance,omitempty"`
	// Code and Message say why there is none, and that there will be none.
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
}

// PoolList answers for all pools.
type PoolList struct {
	Pools []Pool `json:"pools"`
}

// PoolInstances answers for the instances of one pool.
type PoolInstances struct {
	Instances []PoolInstance `json:"instances"`
}

// A ResizeRequest takes a pool from one size to another. One with a RequestID that
// was done before changes nothing. Fewer than Expected gives up what has not come.
type ResizeRequest struct {
	RequestID string `json:"requestID"`
	Expected  int32  `json:"expected"`
	Size      int32  `json:"size"`
}

// A RemoveRequest deletes instances of a pool, by their slots or provider ids, and
// lowers its size by as many; all or none of them. What is gone or going is left out.
type RemoveRequest struct {
	Instances []string `json:"instances"`
}

// Pools returns all pools, by name.
func (c *Client) Pools(ctx context.Context) ([]Pool, error) {
	list, err := call[PoolList](ctx, c.conn, http.MethodGet, "/v1/pools", nil)
	if err != nil {
		return nil, err
	}

	return list.Pools, nil
}

// PutPool defines a pool, or defines it anew; its instances stay as they are.
func (c *Client) PutPool(ctx context.Context, pool Pool) (*Pool, error) {
	return call[Pool](ctx, c.conn, http.MethodPut, poolPath(pool.Name, ""), pool)
}

// PoolInstances returns what a pool has.
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
