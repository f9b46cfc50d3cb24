package message

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Printable replaces characters that are not printable by spaces: a publisher must not
// be able to move the reader's cursor.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return ' '
		}

		return r
	}, text)
}

// summary returns an envelope as one line.
func summary(env *driverv1.Envelope) string {
	kind := bodyName(env)
	if kind == "" {
		return newerText(len(env.ProtoReflect().GetUnknown()))
	}
	var details string
	switch {
	case bus.RequestOf(env) != nil:
		details = requestText(env)
	case env.GetAccepted() != nil, env.GetProgress() != nil, env.GetResult() != nil, env.GetBusy() != nil:
		details = frameText(env)
	case strings.HasPrefix(kind, "fetch"):
		details = fetchText(env)
	default:
		details = controlText(env)
	}

	return strings.TrimSpace(kind + " " + details)
}

func newerText(unknown int) string {
	return fmt.Sprintf("body of a newer contract (%d bytes)", unknown)
}

// bodyName returns the name of the envelope's body in the contract.
func bodyName(env proto.Message) string {
	m := env.ProtoReflect()
	body := m.WhichOneof(m.Descriptor().Oneofs().ByName("body"))
	if body == nil {
		return ""
	}

	return string(body.Name())
}

func requestText(env *driverv1.Envelope) string {
	text := fmt.Sprintf("%s attempt %d", env.GetOperationId(), env.GetAttempt())
	if class := bus.ClassOf(env).GetClass(); class != nil {
		text += " class " + refText(class)
	}
	text += groupRequestText(env.GetNodeGroups())
	if env.GetTimeout() != nil {
		text += " timeout " + env.GetTimeout().AsDuration().Round(time.Millisecond).String()
	}
	if env.GetRecover() {
		text += " recover"
	}

	return text
}

func frameText(env *driverv1.Envelope) string {
	head := fmt.Sprintf("%s attempt %d by %s", env.GetOperationId(), env.GetAttempt(), env.GetReplica())
	switch {
	case env.GetProgress() != nil:
		return head + ": " + env.GetProgress().GetMessage()
	case env.GetResult() != nil:
		return head + ": " + resultText(env.GetResult())
	case env.GetBusy() != nil:
		return head + ": " + strings.ToLower(strings.TrimPrefix(env.GetBusy().GetReason().String(), "BUSY_REASON_"))
	default:
		return head
	}
}

func resultText(r *driverv1.Result) string {
	text := statusText(r.GetStatus())
	// At most one of them is set.
	id := cmp.Or(r.GetCreate().GetInstance().GetProviderId(), r.GetInitialize().GetInstance().GetProviderId(),
		r.GetInstanceStatus().GetInstance().GetProviderId())
	if id != "" {
		text += " " + id
	}
	if r.GetList() != nil {
		text += fmt.Sprintf(" %d instances", len(r.GetList().GetInstances()))
	}

	return text + groupAnswerText(r.GetNodeGroups())
}

func statusText(s *driverv1.Status) string {
	text := bus.CodeName(s.GetCode())
	if s.GetMessage() != "" {
		text += " " + s.GetMessage()
	}

	return text
}

func fetchText(env *driverv1.Envelope) string {
	switch b := env.GetBody().(type) {
	case *driverv1.Envelope_FetchClass:
		return refText(b.FetchClass.GetClass())
	case *driverv1.Envelope_FetchedClass:
		return statusText(b.FetchedClass.GetStatus()) + " " + refText(b.FetchedClass.GetClass().GetReference())
	case *driverv1.Envelope_FetchSecret:
		return refText(b.FetchSecret.GetSecret()) + " of class " + refText(b.FetchSecret.GetClass())
	case *driverv1.Envelope_FetchedSecret:
		return statusText(b.FetchedSecret.GetStatus()) + " " + sealedText(b.FetchedSecret.GetSealed())
	case *driverv1.Envelope_FetchBootstrap:
		return b.FetchBootstrap.GetNamespace() + "/" + b.FetchBootstrap.GetMachine()
	case *driverv1.Envelope_FetchedBootstrap:
		return statusText(b.FetchedBootstrap.GetStatus()) + " " + sealedText(b.FetchedBootstrap.GetSealed())
	default:
		return ""
	}
}

func controlText(env *driverv1.Envelope) string {
	switch b := env.GetBody().(type) {
	case *driverv1.Envelope_Session:
		return sessionText(b.Session)
	case *driverv1.Envelope_Hello:
		return fmt.Sprintf("%s leads %s, epoch %d", b.Hello.GetMcm(), b.Hello.GetCluster(), b.Hello.GetEpoch())
	case *driverv1.Envelope_Changed:
		kind := strings.ToLower(strings.TrimPrefix(b.Changed.GetKind().String(), "KIND_"))

		return kind + " " + refText(b.Changed.GetReference())
	case *driverv1.Envelope_Ops:
		return b.Ops.GetOperationId()
	case *driverv1.Envelope_OpsHeld:
		return fmt.Sprintf("%d by %s", len(b.OpsHeld.GetOperations()), env.GetReplica())
	case *driverv1.Envelope_Cancel:
		return b.Cancel.GetOperationId()
	case *driverv1.Envelope_Acknowledge:
		return b.Acknowledge.GetOperationId()
	case *driverv1.Envelope_Audit:
		return auditText(b.Audit)
	case *driverv1.Envelope_Claim:
		return claimText(b.Claim)
	default:
		return ""
	}
}

func sessionText(s *driverv1.Session) string {
	text := fmt.Sprintf("%s runs %d of %d, holds %d of %s",
		s.GetReplica(), s.GetRunning(), s.GetSlots(), len(s.GetOperations()), s.GetCluster())
	if s.GetDraining() {
		text += ", draining"
	}
	if s.GetStopped() {
		text += ", stopped"
	}

	return text
}

func claimText(c *driverv1.Claim) string {
	text := fmt.Sprintf("%s attempt %d by %s: %s", c.GetOperationId(), c.GetAttempt(), c.GetReplica(),
		strings.ToLower(strings.TrimPrefix(c.GetState().String(), "STATE_")))
	if c.GetOutcome() != nil {
		text += " " + bus.CodeName(c.GetOutcome().GetCode())
	}

	return text
}

func auditText(a *driverv1.Audit) string {
	return fmt.Sprintf("%s %s/%s attempts %d by %s waited %s took %s: %s",
		bus.Verb(a.GetOperation()), a.GetNamespace(), a.GetName(), a.GetAttempts(), a.GetReplica(),
		short(a.GetWaited()), short(a.GetTook()), statusText(a.GetStatus()))
}

func short(d *durationpb.Duration) string { return d.AsDuration().Round(time.Millisecond).String() }

func refText(r *driverv1.ObjectReference) string {
	if r == nil {
		return "-"
	}

	return r.GetNamespace() + "/" + r.GetName()
}

func sealedText(s *driverv1.Sealed) string {
	if s == nil {
		return ""
	}

	return fmt.Sprintf("sealed %d bytes", len(s.GetBox()))
}
