package bus

import (
	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An Announcer publishes notices of a control plane, which have no answer. It is safe
// for concurrent use.
type Announcer struct {
	conn    *Conn
	cluster string
}

// NewAnnouncer returns an Announcer of one control plane.
func NewAnnouncer(conn *Conn, cluster string) (*Announcer, error) {
	if err := ValidToken("cluster", cluster); err != nil {
		return nil, err
	}

	return &Announcer{conn: conn, cluster: cluster}, nil
}

// Hello says who leads, with the versions of the protocol that this package speaks
// unless h names others.
func (a *Announcer) Hello(h *driverv1.Hello) error {
	h.Cluster = a.cluster
	if h.GetProtocolMax() == 0 {
		h.ProtocolMin, h.ProtocolMax = Spoken.Lowest, Spoken.Highest
	}

	return a.conn.send(Pattern(a.cluster, TreeHello), "", &driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: h}})
}

// Changed publishes to the replicas of a provider that a class or secret has a new
// version.
func (a *Announcer) Changed(provider string, change *driverv1.Changed) error {
	if err := ValidToken("provider", provider); err != nil {
		return err
	}

	return a.conn.send(Pattern(a.cluster, TreeChanged, provider), "", &driverv1.Envelope{
		Body: &driverv1.Envelope_Changed{Changed: change},
	})
}

// Audit publishes the end of an operation.
func (a *Announcer) Audit(audit *driverv1.Audit) error {
	audit.Cluster = a.cluster
	subject, err := Subject{
		Cluster: a.cluster, Tree: TreeAudit, Provider: audit.GetProvider(), Verb: Verb(audit.GetOperation()),
		Namespace: audit.GetNamespace(), Name: audit.GetName(),
	}.Build()
	if err != nil {
		return err
	}

	return a.conn.send(subject, "", &driverv1.Envelope{
		OperationId: audit.GetOperationId(), Body: &driverv1.Envelope_Audit{Audit: audit},
	})
}

// WatchHello passes on who leads a control plane; cluster may be "*". A hello that
// does not fit its subject is dropped, as by [WatchSessions].
func WatchHello(conn *Conn, cluster string, f func(*driverv1.Hello)) (stop func(), err error) {
	return conn.watch(Pattern(cluster, TreeHello), func(m *nats.Msg) {
		env, err := DecodeMessage(m)
		if err != nil {
			return
		}
		if h := env.GetHello(); h != nil && m.Subject == Pattern(h.GetCluster(), TreeHello) {
			f(h)
		}
	})
}

// WatchSessions passes on the sessions of a control plane's replicas; cluster
// may be "*". A session that does not fit its subject is dropped: NATS's
// permissions vouch for the subject only. So is one of a replica "plain", as by mcm.
func WatchSessions(conn *Conn, cluster string, f func(*driverv1.Session)) (stop func(), err error) {
	return conn.watch(Pattern(cluster, TreeSession, "*", "*"), SessionHandler(func(s *driverv1.Session) {
		if s.GetReplica() != PlainReplica {
			f(s)
		}
	}))
}

// SessionHandler returns a handler of session messages, which passes on those that fit their
// subject: NATS's permissions vouch for the subject only.
func SessionHandler(f func(*driverv1.Session)) nats.MsgHandler {
	return func(m *nats.Msg) {
		env, err := DecodeMessage(m)
		if err != nil {
			return
		}
		s, subject := env.GetSession(), m.Subject
		if s != nil && subject == Pattern(s.GetCluster(), TreeSession, s.GetProvider(), s.GetReplica()) {
			f(s)
		}
	}
}
