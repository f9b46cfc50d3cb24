package cloud

import (
	"net/http"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func (s *server) registerPools(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/pools", s.api(cloudapi.OpPool, func(http.ResponseWriter, *http.Request) (request, error) {
		return pooled("", func() (any, error) { return cloudapi.PoolList{Pools: s.cloud.Pools()}, nil }), nil
	}))
	mux.HandleFunc("PUT /v1/pools/{name}", s.api(cloudapi.OpPool, func(w http.ResponseWriter, r *http.Request) (request, error) {
		in, err := readJSON[cloudapi.Pool](w, r)
		in.Name = r.PathValue("name")

		return pooled(in.Name, func() (any, error) { return s.cloud.PutPool(in) }), err
	}))
	mux.HandleFunc("GET /v1/pools/{name}/instances", s.api(cloudapi.OpPool, func(_ http.ResponseWriter, r *http.Request) (request, error) {
		name := r.PathValue("name")

		return pooled(name, func() (any, error) {
			list, err := s.cloud.PoolInstances(name)

			return cloudapi.PoolInstances{Instances: list}, err
		}), nil
	}))
	mux.HandleFunc("POST /v1/pools/{name}/resize", s.api(cloudapi.OpPool, func(w http.ResponseWriter, r *http.Request) (request, error) {
		name := r.PathValue("name")
		in, err := readJSON[cloudapi.ResizeRequest](w, r)

		return pooled(name, func() (any, error) { return s.cloud.ResizePool(name, in) }), err
	}))
	mux.HandleFunc("POST /v1/pools/{name}/remove", s.api(cloudapi.OpPool, func(w http.ResponseWriter, r *http.Request) (request, error) {
		name := r.PathValue("name")
		in, err := readJSON[cloudapi.RemoveRequest](w, r)

		return pooled(name, func() (any, error) { return s.cloud.RemoveFromPool(name, in) }), err
	}))
}

// pooled returns a request about a pool.
func pooled(name string, do func() (any, error)) request {
	return request{name: name, do: func() (cloudapi.Instance, int, any, error) {
		body, err := do()

		return cloudapi.Instance{Name: name}, http.StatusOK, body, err
	}}
}
