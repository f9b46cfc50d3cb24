package install

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/dev/stack"
)

const (
	driverPassword = "virtual-password"
	driverHash     = "$2a$04$6WHmtRU8PrIMJaljBLGGm.Txzf8plZsXUihNdbKQqlaftiNs0boXC" // of driverPassword, at the lowest cost
)

// embeddedConf writes nats.conf for a test: with its certificates and, where
// they are given, with values in the place of environment variables.
func embeddedConf(t *testing.T, ca *authority, values map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	ca.issue(filepath.Join(dir, "nats-tls"), "server")
	replace := []string{"/etc/machinebus", dir}
	for name, value := range values {
		replace = append(replace, "$"+name, fmt.Sprintf("%q", value))
	}

	return rewrite(t, "kustomize/mcm-embedded-nats/nats.conf", filepath.Join(dir, "nats.conf"), replace...)
}

// withGateway takes the comment signs off the gateway's user in a test's nats.conf,
// as deploy/README.md has it done.
func withGateway(t *testing.T, conf string) string {
	t.Helper()
	content, err := os.ReadFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?m)^ {4}# ([{}]| {2}.*)$`).ReplaceAllString(string(content), "    $1")
	if !strings.Contains(text, "\n      user: autoscaler\n") {
		t.Fatalf("no user of the gateway in\n%s", text)
	}
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	return conf
}

// rewrite copies a file of deploy/ with some of its texts replaced, each of which
// must occur, and returns the copy's path.
func rewrite(t *testing.T, from, to string, replace ...string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(deployDir, from))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(string(content), replace[i]) {
			t.Fatalf("%s has no %q any more", from, replace[i])
		}
	}
	if err := os.WriteFile(to, []byte(strings.NewReplacer(replace...).Replace(string(content))), 0o600); err != nil {
		t.Fatal(err)
	}

	return to
}

// startCluster starts three nats-servers with nats-server.conf and returns their
// URLs.
func startCluster(t *testing.T, site *stack.Site, clients *authority) []string {
	t.Helper()
	const servers = 3
	ports := make([]int, 3*servers)
	for i := range ports {
		port, err := stack.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		ports[i] = port
	}
	routes := newAuthority(t) // of its own, as the file recommends
	var urls []string
	for i := range servers {
		dir := t.TempDir()
		clients.issue(filepath.Join(dir, "tls"), "server")
		routes.issue(filepath.Join(dir, "route-tls"), "server")
		name := fmt.Sprintf("nats-%d", i)
		replace := []string{
			"/etc/nats", dir, `"/data"`, fmt.Sprintf("%q", filepath.Join(dir, "data")), "$SERVER_NAME", name,
			"0.0.0.0:4222", stack.Loopback(ports[i]), "0.0.0.0:6222", stack.Loopback(ports[servers+i]),
			"127.0.0.1:8222", stack.Loopback(ports[2*servers+i]),
		}
		for j := range servers {
			replace = append(replace, fmt.Sprintf("nats-%d.nats.machinebus-nats.svc:6222", j), stack.Loopback(ports[servers+j]))
		}
		conf := rewrite(t, "nats/nats-server.conf", filepath.Join(dir, "nats-server.conf"), replace...)
		if _, err := site.Start(name, "nats-server", "--config", conf); err != nil {
			t.Fatal(err)
		}
		urls = append(urls, "tls://"+stack.Loopback(ports[i]))
	}
	for i := range servers {
		// As the readiness probe asks; it is healthy once the three have found each other.
		eventually(t, fmt.Sprintf("nats-%d is healthy", i), func(ctx context.Context) error {
			return answersOK(ctx, "http://"+stack.Loopback(ports[2*servers+i])+"/healthz")
		})
	}

	return urls
}

// An attempt is something that a user tries on the bus.
type attempt struct {
	user     string
	do       string // publish, subscribe, or the name of a queue group to subscribe in
	subject  string
	allowed  bool
	reason   string
	external bool // only there: with an embedded NATS mcm's user may do anything, and no client can be it over the network
}

var attempts = map[string]attempt{
	"takes requests":            {user: "virtual", do: "driver", subject: "mcm.v1.default.driver.virtual.>", allowed: true, reason: "its work"},
	"listens to requests":       {user: "virtual", do: "subscribe", subject: "mcm.v1.default.driver.virtual.>", reason: "they are for one replica"},
	"another queue group":       {user: "virtual", do: "spy", subject: "mcm.v1.default.driver.virtual.>", reason: "it would get a copy of each request"},
	"directed requests":         {user: "virtual", do: "subscribe", subject: "mcm.v1.default.replica.virtual.r1.>", allowed: true, reason: "its own"},
	"own inbox":                 {user: "virtual", do: "subscribe", subject: "_INBOX_driver.virtual.x.*", allowed: true, reason: "fetched classes and secrets"},
	"answers":                   {user: "virtual", do: "publish", subject: "mcm.v1.default.reply.virtual.m.t", allowed: true, reason: "results"},
	"fetches":                   {user: "virtual", do: "publish", subject: "mcm.v1.default.fetch.virtual.secret", allowed: true, reason: "secrets"},
	"other's work":              {user: "virtual", do: "driver", subject: "mcm.v1.default.driver.other.>", reason: "another provider's"},
	"other's inbox":             {user: "virtual", do: "subscribe", subject: "_INBOX_driver.other.>", reason: "another provider's secrets"},
	"every inbox":               {user: "virtual", do: "subscribe", subject: "_INBOX.>", reason: "everybody's answers"},
	"everything":                {user: "virtual", do: "subscribe", subject: ">", reason: "everybody's"},
	"reads answers":             {user: "virtual", do: "subscribe", subject: "mcm.v1.default.reply.virtual.>", reason: "mcm's"},
	"serves fetches":            {user: "virtual", do: "mcm", subject: "mcm.v1.default.fetch.*.*", reason: "mcm's; it would be asked for others' secrets"},
	"answers for others":        {user: "virtual", do: "publish", subject: "mcm.v1.default.reply.other.m.t", reason: "another provider's result"},
	"asks itself":               {user: "virtual", do: "publish", subject: "mcm.v1.default.driver.virtual.delete.ns.m", reason: "only mcm asks"},
	"says hello":                {user: "virtual", do: "publish", subject: "mcm.v1.default.hello", reason: "it would pass for mcm"},
	"lives for others":          {user: "virtual", do: "publish", subject: "mcm.v1.default.session.other.r1", reason: "another provider's replica"},
	"fetches for others":        {user: "virtual", do: "publish", subject: "mcm.v1.default.fetch.other.secret", reason: "another provider's secret"},
	"other control plane":       {user: "virtual", do: "driver", subject: "mcm.v1.second.driver.virtual.>", reason: "not named for it"},
	"streams":                   {user: "virtual", do: "publish", subject: "$JS.API.STREAM.NAMES", reason: "nothing of a driver's"},
	"system":                    {user: "virtual", do: "subscribe", subject: "$SYS.>", reason: "the servers'"},
	"operator watches":          {user: "operator", do: "subscribe", subject: "mcm.v1.>", allowed: true, reason: "nothing secret is readable there"},
	"operator discovers":        {user: "operator", do: "publish", subject: "$SRV.PING", allowed: true, reason: "nats micro ls"},
	"operator asks mcm":         {user: "operator", do: "publish", subject: "mcm.v1.default.outcomes", allowed: true, reason: "mcmctl ops"},
	"driver asks mcm":           {user: "virtual", do: "publish", subject: "mcm.v1.default.outcomes", reason: "other providers' machines"},
	"operator migrates":         {user: "operator", do: "publish", subject: "mcm.v1.default.driver.virtual.migrateclass.ns.c", allowed: true, reason: "mcmctl migrate; it changes nothing"},
	"operator changes":          {user: "operator", do: "publish", subject: "mcm.v1.default.driver.virtual.delete.ns.m", reason: "people use kubectl"},
	"operator reads inboxes":    {user: "operator", do: "subscribe", subject: "_INBOX_driver.>", reason: "fetched secrets, even sealed, are only for the driver"},
	"mcm serves fetches":        {user: "mcm", do: "mcm", subject: "mcm.v1.default.fetch.*.*", allowed: true, external: true, reason: "its work"},
	"mcm asks":                  {user: "mcm", do: "publish", subject: "mcm.v1.default.driver.virtual.create.ns.m", allowed: true, external: true, reason: "its work"},
	"mcm answers people":        {user: "mcm", do: "publish", subject: "_INBOX_op.x", allowed: true, external: true, reason: "mcmctl ops"},
	"mcm is asked by people":    {user: "mcm", do: "subscribe", subject: "mcm.v1.default.outcomes", allowed: true, external: true, reason: "mcmctl ops"},
	"mcm of another name":       {user: "mcm", do: "publish", subject: "mcm.v1.second.driver.virtual.create.ns.m", external: true, reason: "another control plane's machines"},
	"mcm listens to everything": {user: "mcm", do: "subscribe", subject: ">", external: true, reason: "it needs a few trees"},
	"gateway hears its answers": {user: "autoscaler", do: "subscribe", subject: "mcm.v1.default.reply.*.autoscaler.*", allowed: true, reason: "its work"},
	"gateway asks for groups":   {user: "autoscaler", do: "publish", subject: "mcm.v1.default.nodegroup.virtual.resize", allowed: true, reason: "its work"},
	"gateway hears of drivers":  {user: "autoscaler", do: "subscribe", subject: "mcm.v1.default.session.*.*", allowed: true, reason: "who serves node groups"},
	"gateway hears mcm":         {user: "autoscaler", do: "subscribe", subject: "mcm.v1.default.reply.>", reason: "answers to mcm are none of its"},
	"gateway deletes machines":  {user: "autoscaler", do: "publish", subject: "mcm.v1.default.driver.virtual.delete.ns.m", reason: "only mcm does"},
	"serves node groups":        {user: "virtual", do: "driver", subject: "mcm.v1.default.nodegroup.virtual.*", allowed: true, reason: "its work"},
	"asks for groups":           {user: "virtual", do: "publish", subject: "mcm.v1.default.nodegroup.virtual.resize", reason: "only the gateway does"},
	"mcm claims":                {user: "mcm", do: "publish", subject: "mcm.v1.default.claim.virtual.u1", allowed: true, external: true, reason: "for plain drivers"},
	"mcm plays a replica":       {user: "mcm", do: "publish", subject: "mcm.v1.default.session.virtual.r1", external: true, reason: "a driver's"},
	"mcm reads claims":          {user: "mcm", do: "publish", subject: "$JS.API.DIRECT.GET.S.mcm.v1.default.claim.virtual.u1", allowed: true, external: true, reason: "what has come of an operation"},
	"mcm deletes streams":       {user: "mcm", do: "publish", subject: "$JS.API.STREAM.DELETE.S", allowed: true, external: true, reason: "one that was rolled back is made again"},
	"mcm purges streams":        {user: "mcm", do: "publish", subject: "$JS.API.STREAM.PURGE.S", external: true, reason: "all that is known of operations would be gone"},
	"claims":                    {user: "virtual", do: "publish", subject: "mcm.v1.default.claim.virtual.u1", allowed: true, reason: "its work"},
	"claims for others":         {user: "virtual", do: "publish", subject: "mcm.v1.default.claim.other.u1", reason: "another provider's machine"},
	"reads claims":              {user: "virtual", do: "publish", subject: "$JS.API.DIRECT.GET.S.mcm.v1.default.claim.virtual.u1", reason: "JetStream would answer to any subject"},
}

// try does what an attempt says, and returns the server's refusal.
func (a attempt) try(t *testing.T, server string, opts ...nats.Option) error {
	t.Helper()
	nc, err := nats.Connect(server, append(opts, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
	if err != nil {
		t.Fatalf("%s cannot connect: %v", a.user, err)
	}
	defer nc.Close()
	switch a.do {
	case "publish":
		err = nc.Publish(a.subject, nil)
	case "subscribe":
		_, err = nc.SubscribeSync(a.subject)
	default:
		_, err = nc.QueueSubscribeSync(a.subject, a.do)
	}
	if err != nil {
		t.Fatalf("%s: %v", a.subject, err)
	}
	if err := nc.Flush(); err != nil { // a refusal comes before the answer to this
		t.Fatal(err)
	}

	return nc.LastError()
}

func (a attempt) check(t *testing.T, err error) {
	t.Helper()
	switch refused := errors.Is(err, nats.ErrPermissionViolation); {
	case err != nil && !refused:
		t.Errorf("%s %s: %v", a.do, a.subject, err)
	case refused == a.allowed:
		t.Errorf("%s %s: refused is %t, want %t: %s", a.do, a.subject, refused, !a.allowed, a.reason)
	}
}

func TestPermissionsOfEmbeddedNATS(t *testing.T) {
	t.Setenv("VIRTUAL_PASSWORD", driverHash) // as the Secret mcm-nats-users does
	t.Setenv("OPERATOR_PASSWORD", driverHash)
	t.Setenv("AUTOSCALER_PASSWORD", driverHash)
	ca := newAuthority(t)
	server, err := embedded.Start(embedded.Options{
		Listen: stack.Loopback(0), ConfigFile: withGateway(t, embeddedConf(t, ca, nil)), StoreDir: t.TempDir(), Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	address := strings.TrimPrefix(strings.TrimPrefix(server.URL(), "nats://"), "tls://")
	roots := nats.RootCAs(filepath.Join(ca.issue(t.TempDir(), "other"), "ca.crt"))

	t.Run("the network has no way to be mcm", func(t *testing.T) {
		for reason, user := range map[string]*url.Userinfo{
			"no credentials":     nil,
			"its name":           url.User("mcm"),
			"empty password":     url.UserPassword("mcm", ""),
			"unknown user":       url.UserPassword("other", driverPassword),
			"wrong password":     url.UserPassword("virtual", "x"),
			"hash as a password": url.UserPassword("virtual", driverHash),
		} {
			nc, err := nats.Connect((&url.URL{Scheme: "tls", User: user, Host: address}).String(), roots)
			if !errors.Is(err, nats.ErrAuthorization) {
				t.Errorf("%s: connect: %v, want %v", reason, err, nats.ErrAuthorization)
			}
			if err == nil {
				nc.Close()
			}
		}
	})
	t.Run("mcm may do everything", func(t *testing.T) {
		err := attempt{user: "mcm", do: "subscribe", subject: ">"}.try(t, "", nats.InProcessServer(server))
		if err != nil {
			t.Error(err)
		}
	})
	for name, a := range attempts {
		if !a.external {
			t.Run(name, func(t *testing.T) {
				a.check(t, a.try(t, (&url.URL{Scheme: "tls", User: url.UserPassword(a.user, driverPassword), Host: address}).String(), roots))
			})
		}
	}
}

func TestPermissionsOfExternalNATS(t *testing.T) {
	site := newSite(t)
	ca := newAuthority(t)
	servers := startCluster(t, site, ca)
	certificates := t.TempDir()
	login := func(commonName string) []nats.Option {
		dir := ca.issue(filepath.Join(certificates, commonName), commonName)

		return []nats.Option{
			nats.RootCAs(filepath.Join(dir, "ca.crt")),
			nats.ClientCert(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")),
		}
	}
	commonNames := map[string]string{"mcm": "mcm", "virtual": "driver-virtual", "operator": "operator", "autoscaler": "mcm-autoscaler"}

	t.Run("strangers", func(t *testing.T) {
		stranger := newAuthority(t).issue(t.TempDir(), "mcm")
		for reason, opts := range map[string][]nats.Option{
			"unknown subject": login("other"),
			"no certificate":  login("other")[:1],
			"another authority's": {
				nats.ClientCert(filepath.Join(stranger, "tls.crt"), filepath.Join(stranger, "tls.key")),
				nats.Secure(&tls.Config{InsecureSkipVerify: true}), // it is the server that must notice
			},
		} {
			nc, err := nats.Connect(servers[0], opts...)
			if err == nil {
				nc.Close()
				t.Errorf("%s: could connect", reason)
			}
		}
	})
	for name, a := range attempts {
		t.Run(name, func(t *testing.T) {
			a.check(t, a.try(t, servers[1], login(commonNames[a.user])...))
		})
	}
}
