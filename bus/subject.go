package bus

import (
	"errors"
	"fmt"
	"strings"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Root starts every subject; the version in it lets two wire versions run side
// by side.
const Root = "mcm.v1"

// Queue groups. They are named explicitly because client libraries disagree on
// a default.
const (
	DriverQueue = "driver"
	fetchQueue  = "mcm"
)

// A Tree is the part of the subject space a subject belongs to.
type Tree string

// The trees below mcm.v1.<cluster>.
const (
	// TreeDriver holds requests to any replica of a provider.
	TreeDriver Tree = "driver"
	// TreeReplica holds requests to one replica.
	TreeReplica Tree = "replica"
	// TreePlain holds requests to drivers that only answer.
	TreePlain Tree = "plain"
	// TreeReply holds reply frames.
	TreeReply Tree = "reply"
	// TreeSession holds the replicas' signs of life.
	TreeSession Tree = "session"
	// TreeClaim holds who runs which operation of a machine.
	TreeClaim Tree = "claim"
	// TreeHello holds the leading manager's sign of life.
	TreeHello Tree = "hello"
	// TreeFetch holds what drivers ask of the manager.
	TreeFetch Tree = "fetch"
	// TreeChanged holds notices that a class or secret has a new version.
	TreeChanged Tree = "changed"
	// TreeNodeGroup holds requests about node groups, to any replica of a provider.
	TreeNodeGroup Tree = "nodegroup"
	// TreeAudit holds one message for each finished operation.
	TreeAudit Tree = "audit"
	// TreeOutcomes holds people's questions to the manager for its newest outcomes.
	TreeOutcomes Tree = "outcomes"
)

// Verbs of TreeReplica beside the operations, and of TreeFetch.
const (
	VerbOps         = "ops"
	VerbCancel      = "cancel"
	VerbAcknowledge = "ack"

	fetchClass     = "class"
	fetchSecret    = "secret"
	fetchBootstrap = "bootstrap"
)

// operationVerbs are the operations' names in subjects, in flags and in
// metrics.
var operationVerbs = map[driverv1.Operation]string{
	driverv1.Operation_OPERATION_CREATE:        "create",
	driverv1.Operation_OPERATION_INITIALIZE:    "initialize",
	driverv1.Operation_OPERATION_DELETE:        "delete",
	driverv1.Operation_OPERATION_STATUS:        "status",
	driverv1.Operation_OPERATION_LIST:          "list",
	driverv1.Operation_OPERATION_VOLUME_IDS:    "volumeids",
	driverv1.Operation_OPERATION_VALIDATE:      "validate",
	driverv1.Operation_OPERATION_MIGRATE_CLASS: "migrateclass",
	driverv1.Operation_OPERATION_NODE_GROUPS:   "nodegroups",
}

var verbOperations = func() map[string]driverv1.Operation {
	m := make(map[string]driverv1.Operation, len(operationVerbs))
	for op, verb := range operationVerbs {
		m[verb] = op
	}

	return m
}()

// Verb returns the operation's name in subjects, such as "create", or
// "unknown".
func Verb(op driverv1.Operation) string {
	if v, ok := operationVerbs[op]; ok {
		return v
	}

	return "unknown"
}

// ParseVerb returns the operation that a subject calls verb.
func ParseVerb(verb string) (driverv1.Operation, bool) {
	op, ok := verbOperations[verb]

	return op, ok
}

// Mutates reports whether an operation changes something at the provider. Such an
// operation must not simply be retried when its answer is lost.
func Mutates(op driverv1.Operation) bool {
	switch op {
	case driverv1.Operation_OPERATION_CREATE,
		driverv1.Operation_OPERATION_INITIALIZE,
		driverv1.Operation_OPERATION_DELETE:
		return true
	default:
		return false
	}
}

// A Subject is a subject of machinebus taken apart. Which fields are set
// depends on the tree:
//
//	driver, plain  Provider Verb Namespace Name
//	replica        Provider Replica Verb [Namespace Name]
//	reply          Provider Caller Token
//	session        Provider Replica
//	claim          Provider Machine
//	fetch          Provider Verb
//	changed        Provider
//	nodegroup      Provider Verb
//	audit          Provider Verb Namespace Name
//	hello          -
//	outcomes       -
type Subject struct {
	Cluster   string
	Tree      Tree
	Provider  string
	Replica   string
	Verb      string
	Namespace string
	Name      string
	Caller    string
	Token     string
	Machine   string // uid
}

// maxFields is how many fields follow a subject's tree at most.
const maxFields = 5

// layout returns the fields that make up the rest of a subject of the tree, in
// order, and false for a tree there is not. It is asked for every message: an array
// stays on the stack.
func layout(s *Subject) (fields [maxFields]*string, n int, known bool) {
	switch s.Tree {
	case TreeDriver, TreePlain, TreeAudit:
		return [maxFields]*string{&s.Provider, &s.Verb, &s.Namespace, &s.Name}, 4, true
	case TreeReplica:
		return [maxFields]*string{&s.Provider, &s.Replica, &s.Verb, &s.Namespace, &s.Name}, maxFields, true
	case TreeReply:
		return [maxFields]*string{&s.Provider, &s.Caller, &s.Token}, 3, true
	case TreeSession:
		return [maxFields]*string{&s.Provider, &s.Replica}, 2, true
	case TreeFetch, TreeNodeGroup:
		return [maxFields]*string{&s.Provider, &s.Verb}, 2, true
	case TreeChanged:
		return [maxFields]*string{&s.Provider}, 1, true
	case TreeClaim:
		return [maxFields]*string{&s.Provider, &s.Machine}, 2, true
	case TreeHello, TreeOutcomes:
		return fields, 0, true
	default:
		return fields, 0, false
	}
}

// controlFields is how many fields a replica subject has that names no machine:
// provider, replica and verb.
const controlFields = 3

// ErrSubject is wrapped by everything that is wrong with a subject or a token.
var ErrSubject = errors.New("not a machinebus subject")

// Build returns the subject as text. Kubernetes names are escaped; it fails
// when a field is empty or holds what a subject cannot carry.
func (s Subject) Build() (string, error) {
	fields, n, ok := layout(&s)
	if !ok {
		return "", fmt.Errorf("%w: unknown tree %q", ErrSubject, s.Tree)
	}
	if err := ValidToken("cluster", s.Cluster); err != nil {
		return "", err
	}
	if s.Tree == TreeReplica && s.Namespace == "" && s.Name == "" {
		n = controlFields
	}
	size := len(Root) + len(s.Cluster) + len(s.Tree) + n + 2 // a dot before each
	for _, field := range fields[:n] {
		size += len(*field)
	}
	var b strings.Builder
	b.Grow(size)
	b.WriteString(Root)
	b.WriteByte('.')
	b.WriteString(s.Cluster)
	b.WriteByte('.')
	b.WriteString(string(s.Tree))
	for _, field := range fields[:n] {
		token := *field
		if strings.Contains(token, "~") {
			return "", fmt.Errorf("%w: %q contains a '~'", ErrSubject, token)
		}
		if field == &s.Namespace || field == &s.Name {
			token = strings.ReplaceAll(token, ".", "~")
		}
		if err := validToken(token); err != nil {
			return "", fmt.Errorf("%w (in %s subject %+v)", err, s.Tree, s)
		}
		b.WriteByte('.')
		b.WriteString(token)
	}

	return b.String(), nil
}

// ParseSubject takes a subject apart. It is the inverse of [Subject.Build].
func ParseSubject(subject string) (Subject, error) {
	var s Subject
	rest, ours := strings.CutPrefix(subject, Root+".")
	cluster, rest, more := strings.Cut(rest, ".")
	if !ours || !more {
		return s, fmt.Errorf("%w: %q does not start with %s.<cluster>.<tree>", ErrSubject, subject, Root)
	}
	tree, rest, more := strings.Cut(rest, ".")
	s.Cluster, s.Tree = cluster, Tree(tree)
	fields, n, ok := layout(&s)
	if !ok {
		return s, fmt.Errorf("%w: %q: unknown tree %q", ErrSubject, subject, s.Tree)
	}
	if err := ValidToken("cluster", s.Cluster); err != nil {
		return s, err
	}
	values := 0
	if more {
		values = strings.Count(rest, ".") + 1
	}
	if s.Tree == TreeReplica && values == controlFields {
		n = controlFields
	}
	if n != values {
		return s, fmt.Errorf("%w: %q: a %s subject has %d more tokens, not %d", ErrSubject, subject, s.Tree, n, values)
	}
	for _, field := range fields[:n] {
		var value string
		value, rest, _ = strings.Cut(rest, ".")
		if err := validToken(value); err != nil {
			return s, fmt.Errorf("%w in %q", err, subject)
		}
		*field = value
		if field == &s.Namespace || field == &s.Name {
			*field = strings.ReplaceAll(value, "~", ".")
		} else if strings.Contains(value, "~") {
			return s, fmt.Errorf("%w: %q: token %q contains a '~'", ErrSubject, subject, value)
		}
	}

	return s, nil
}

// ValidToken checks a cluster's, provider's or replica's name: one subject
// token of letters, digits, '-' and '_'. What names the thing in the error.
func ValidToken(what, token string) error {
	if err := validToken(token); err != nil || strings.Contains(token, "~") {
		return fmt.Errorf("%w: %s %q: use only letters, digits, '-' and '_'", ErrSubject, what, token)
	}

	return nil
}

func validToken(token string) error {
	if token == "" {
		return fmt.Errorf("%w: empty token", ErrSubject)
	}
	for i := range len(token) {
		c := token[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '~':
		default:
			return fmt.Errorf("%w: token %q contains %q", ErrSubject, token, c)
		}
	}

	return nil
}

// Pattern returns the subject pattern of everything below a tree's first
// tokens, which must be valid or "*".
func Pattern(cluster string, tree Tree, tokens ...string) string {
	parts := append([]string{Root, cluster, string(tree)}, tokens...)

	return strings.Join(parts, ".")
}

// ReplyPrefix returns the prefix of the reply subjects of a provider's replicas. A
// request with another reply subject would make the replica publish for another party.
func ReplyPrefix(cluster, provider string) string {
	return Root + "." + cluster + "." + string(TreeReply) + "." + provider + "."
}

// ManagerInboxPrefix is where mcm receives JetStream's answers.
const ManagerInboxPrefix = "_INBOX_mcm"

// InboxPrefix is where a driver of provider receives the answers to its own
// requests. The manager answers nowhere else [FETCH-1].
func InboxPrefix(provider string) string {
	return "_INBOX_driver." + provider
}

// PlainReplica stands for a plain driver in a claim: mcm claims for it.
const PlainReplica = "plain"

// ValidReplica checks a replica's id. One name stands for drivers without sessions
// [SESSION-2].
func ValidReplica(id string) error {
	if id == PlainReplica {
		return fmt.Errorf("replica %q: the name is reserved for drivers without sessions: choose another name, or leave it empty", id)
	}

	return ValidToken("replica", id)
}

// StreamName returns the name of the operations stream of a provider. An
// underscore in a name is written "=", so that no two pairs of names share a stream.
func StreamName(cluster, provider string) string {
	escape := strings.NewReplacer("_", "=")

	return "MCM_OPS_" + escape.Replace(cluster) + "_" + escape.Replace(provider)
}
