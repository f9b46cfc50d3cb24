package machineclass

import (
	"context"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// Reasons of Events on a class.
const (
	// EventClassAccepted: the driver accepts the class.
	EventClassAccepted = "ClassAccepted"
	// EventClassWarning: a warning of the driver about the class.
	EventClassWarning = "ClassWarning"
	// EventInvalidClass: the driver rejects the class.
	EventInvalidClass = "InvalidClass"
	// EventClassNotChecked: the driver could not check the class; mcm asks again.
	EventClassNotChecked = "ClassNotChecked"
)

const (
	// A driver that could not check a class is asked again after firstRecheck. The time
	// doubles with each try, up to longestRecheck.
	firstRecheck, longestRecheck = time.Minute, time.Hour
	// maxAnswer keeps an Event's message below its limit of 1024 bytes.
	maxAnswer = 800
)

// checkUntilAnswered asks the driver about a class until it answers, and records the answer
// as Events. It records none if the driver does not validate classes.
func (v *Validator) checkUntilAnswered(ctx context.Context, class dispatch.Class) {
	provider, err := dispatch.Provider(class.Object, v.defaultProvider)
	if err != nil {
		v.events.Event(class.Object, corev1.EventTypeWarning, EventInvalidClass, err.Error())

		return
	}
	reported := false
	for wait := firstRecheck; ; wait = min(2*wait, longestRecheck) {
		warnings, err := v.driver.Validate(ctx, provider, class)
		if ctx.Err() != nil {
			return
		}
		if !transient(err) {
			v.recordAnswer(ctx, class, provider, warnings, err)

			return
		}
		if !reported {
			reported = true
			v.events.Eventf(class.Object, corev1.EventTypeWarning, EventClassNotChecked,
				"The driver of provider %s could not check the class; retries until it answers: %s: %s",
				provider, dispatch.CodeOf(err), truncate(err.Error()))
		}
		pause := time.NewTimer(max(wait, dispatch.RetryAfter(err)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()

			return
		}
	}
}

// transient reports whether an error is about the cloud or the driver, not the class.
func transient(err error) bool {
	switch dispatch.CodeOf(err) {
	case dispatch.Canceled, dispatch.Unknown, dispatch.DeadlineExceeded, dispatch.ResourceExhausted,
		dispatch.Aborted, dispatch.Internal, dispatch.Unavailable:
		return true
	default:
		return false
	}
}

func (v *Validator) recordAnswer(ctx context.Context, class dispatch.Class, provider string, warnings []string, err error) {
	code := dispatch.CodeOf(err)
	ctrl.LoggerFrom(ctx).V(1).Info("the driver has checked the class",
		"provider", provider, "code", code.String(), "warnings", len(warnings))
	if code == dispatch.Unimplemented {
		return
	}
	for _, w := range warnings {
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventClassWarning,
			"The driver of provider %s warns: %s", provider, truncate(w))
	}
	switch code {
	case dispatch.OK:
		v.events.Eventf(class.Object, corev1.EventTypeNormal, EventClassAccepted,
			"The driver of provider %s accepts the class", provider)
	case dispatch.Unauthenticated, dispatch.PermissionDenied:
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventInvalidClass,
			"The driver of provider %s cannot use the class: %s: %s; correct the credentials in its secrets or their permissions",
			provider, code, truncate(err.Error()))
	default:
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventInvalidClass,
			"The driver of provider %s cannot use the class: %s: %s; correct the class and apply it again",
			provider, code, truncate(err.Error()))
	}
}

// truncate cuts a driver's text to a length that fits an Event.
func truncate(text string) string {
	if len(text) <= maxAnswer {
		return text
	}
	cut := maxAnswer
	for cut > 0 && !utf8.RuneStart(text[cut]) {
		cut--
	}

	return text[:cut] + "…"
}
