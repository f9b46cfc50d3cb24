package install

import (
	"encoding/pem"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// A recorder is a proxy in front of the API server that records the rights that requests
// need.
type recorder struct {
	cluster *clientcmdapi.Cluster // how kubeconfigs lead to it
	proxy   *httputil.ReverseProxy

	mu    sync.Mutex
	asked map[right]bool
}

func newRecorder(t *testing.T) *recorder {
	t.Helper()
	admin, err := clientcmd.BuildConfigFromFlags("", shared.cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(rest.AnonymousClientConfig(admin)) // clients authenticate themselves
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(admin.Host)
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{asked: map[right]bool{}, proxy: &httputil.ReverseProxy{
		Transport: transport, Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(target) },
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}}
	server := httptest.NewTLSServer(r) // clients send tokens only over TLS
	t.Cleanup(server.Close)
	r.cluster = &clientcmdapi.Cluster{
		Server:                   server.URL,
		CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	}

	return r
}

func (r *recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if asked, ok := rightFor(req); ok {
		r.mu.Lock()
		r.asked[asked] = true
		r.mu.Unlock()
	}
	r.proxy.ServeHTTP(w, req)
}

func (r *recorder) all() []right {
	r.mu.Lock()
	defer r.mu.Unlock()

	return slices.Collect(maps.Keys(r.asked))
}

// rightFor returns the right that a request needs; false for discovery, which everyone may
// do.
func rightFor(req *http.Request) (right, bool) {
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	group := "core"
	switch {
	case parts[0] == "api" && len(parts) > 2:
		parts = parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		group, parts = parts[1], parts[3:]
	default:
		return right{}, false
	}
	var r right
	if parts[0] == "namespaces" && len(parts) > 2 {
		r.Namespace, parts = parts[1], parts[2:]
	}
	r.Resource = group + "/" + parts[0]
	if len(parts) > 1 {
		r.Name = parts[1]
	}
	if len(parts) > 2 {
		r.Resource += "/" + parts[2]
	}
	switch req.Method {
	case http.MethodPost:
		r.Verb = "create"
	case http.MethodGet:
		r.Verb = "get"
	default:
		r.Verb = strings.ToLower(req.Method)
		if r.Verb == "put" {
			r.Verb = "update"
		}
	}
	switch {
	case r.Verb == "get" && req.URL.Query().Get("watch") != "":
		r.Verb = "watch"
	case r.Verb == "get" && r.Name == "":
		r.Verb = "list"
	case r.Verb == "delete" && r.Name == "":
		r.Verb = "deletecollection"
	}

	return r, true
}

// unasked are the rights that no request needs, with their reason.
var unasked = map[string]string{
	"machine.sapcloud.io/machinesets/finalizers":        "the admission plugin OwnerReferencesPermissionEnforcement, which is off by default",
	"machine.sapcloud.io/machinedeployments/finalizers": "the same",
}

// rolesFit fails the test unless the roles grant all that mcm asked for since the
// rig was made, and nothing that it never did.
func (r *rig) rolesFit() {
	r.Helper()
	rights, used := granted(r.T, r.objects), map[right]bool{}
	for _, asked := range r.recorder.all() {
		by := slices.DeleteFunc(slices.Clone(rights), func(g right) bool { return !g.covers(asked) })
		if len(by) == 0 {
			r.Errorf("mcm asks to %s %s %s/%s, and no role grants it", asked.Verb, asked.Resource, asked.Namespace, asked.Name)
		}
		// The right to one object makes the right to all of them no more needed.
		if named := func(g right) bool { return g.Name != "" }; slices.ContainsFunc(by, named) {
			by = slices.DeleteFunc(by, func(g right) bool { return !named(g) })
		}
		for _, g := range by {
			used[g] = true
		}
	}
	for _, g := range rights {
		if !used[g] && unasked[g.Resource] == "" {
			r.Errorf("%s grants to %s %s %s, for which mcm never asked", g.Role, g.Verb, g.Resource, g.Name)
		}
	}
}
