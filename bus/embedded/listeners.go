package embedded

import (
	"crypto/tls"
	"fmt"
	"net"

	"github.com/nats-io/nats-server/v2/server"
)

// A listener is one way in from outside of the process.
type listener struct {
	of, host string
	tls      *tls.Config
	plain    bool // also without TLS
	known    bool // requires authentication
}

// listenersOf returns those that a configuration has; that of clients comes first.
func listenersOf(o *server.Options) []listener {
	known := knowsClients(o)
	all := []listener{{"clients", o.Host, o.TLSConfig, o.TLSConfig == nil || o.AllowNonTLS, known}}
	add := func(of, host string, port int, config *tls.Config, known bool) {
		if port != 0 {
			all = append(all, listener{of, host, config, config == nil, known})
		}
	}
	web, mqtt, leaf, cluster, gateway := &o.Websocket, &o.MQTT, &o.LeafNode, &o.Cluster, &o.Gateway
	add("websockets", web.Host, web.Port, web.TLSConfig, known || web.Username != "" || web.Token != "")
	add("MQTT", mqtt.Host, mqtt.Port, mqtt.TLSConfig, known || mqtt.Username != "" || mqtt.Token != "")
	add("leaf nodes", leaf.Host, leaf.Port, leaf.TLSConfig, known || leaf.Username != "" || verifies(leaf.TLSConfig))
	add("other servers", cluster.Host, cluster.Port, cluster.TLSConfig, cluster.Username != "" || verifies(cluster.TLSConfig))
	add("gateways", gateway.Host, gateway.Port, gateway.TLSConfig, gateway.Username != "" || verifies(gateway.TLSConfig))

	return all
}

func knowsClients(o *server.Options) bool {
	return len(o.Users) > 0 || len(o.Nkeys) > 0 || len(o.TrustedOperators) > 0 || o.Username != "" ||
		o.Authorization != "" || o.TLSMap || o.AuthCallout != nil
}

func verifies(config *tls.Config) bool {
	return config != nil && config.ClientAuth == tls.RequireAndVerifyClientCert
}

// requiresTLS reports whether clients outside of the process must use TLS.
func requiresTLS(o *server.Options) bool {
	for _, l := range listenersOf(o) {
		if l.plain {
			return false
		}
	}

	return true
}

// checkInsecure returns an error for a listener beyond loopback without TLS or without
// authentication, unless AllowInsecure is set.
func (s *Server) checkInsecure(o *server.Options) error {
	if s.opts.AllowInsecure {
		return nil
	}
	for _, l := range listenersOf(o) {
		if !loopback(l.host) && (l.plain || !l.known) {
			return fmt.Errorf("NATS would listen for %s on %q beyond loopback without TLS or without authentication: "+
				"configure both in a --nats-config file, or allow it explicitly with --nats-allow-insecure", l.of, l.host)
		}
	}

	return nil
}

func loopback(host string) bool {
	return host == "localhost" || net.ParseIP(host).IsLoopback() // of nil, too
}
