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
	// EventClassAccepted: the driver could use the class.
	EventClassAccepted = "ClassAccepted"
	// EventClassWarning: the driver could use the class, and warns of something.
	EventClassWarning = "ClassWarning"
	// EventInvalidClass: the class has to be mended.
	EventInvalidClass = "InvalidClass"
	// EventClassNotChecked: the driver was asked and could not tell.
	EventClassNotChecked = "ClassNotChecked"
)

const (
	// A driver that could not tell is asked again after this time, which doubles
	// each time.
	firstRecheck, longestRecheck = time.Minute, time.Hour
	// maxAnswer keeps an Event's message below the 1024 bytes that it may have.
	maxAnswer = 800
)

// answer asks about a class until there is an answer, and shows it. Without a
// driver that knows how to answer nothing is shown.
func (v *Validator) answer(ctx context.Context, class dispatch.Class) {
	provider, err := dispatch.Provider(class.Object, v.defaultProvider)
	if err != nil {
		v.events.Event(class.Object, corev1.EventTypeWarning, EventInvalidClass, err.Error())

		return
	}
	told := false
	for wait := firstRecheck; ; wait = min(2*wait, longestRecheck) {
		warnings, err := v.driver.Validate(ctx, provider, class)
		if ctx.Err() != nil {
			return
		}
		if !passing(err) {
			v.show(ctx, class, provider, warnings, err)

			return
		}
		if !told {
			told = true
			v.events.Eventf(class.Object, corev1.EventTypeWarning, EventClassNotChecked,
				"The driver of provider %s could not check the class and is asked again later: %s: %s",
				provider, dispatch.CodeOf(err), short(err.Error()))
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

// passing tells that an error says something about the cloud or the driver, not
// about the class.
func passing(err error) bool {
	switch dispatch.CodeOf(err) {
	case dispatch.Canceled, dispatch.Unknown, dispatch.DeadlineExceeded, dispatch.ResourceExhausted,
		dispatch.Aborted, dispatch.Internal, dispatch.Unavailable:
		return true
	default:
		return false
	}
}

func (v *Validator) show(ctx context.Context, class dispatch.Class, provider string, warnings []string, err error) {
	code := dispatch.CodeOf(err)
	ctrl.LoggerFrom(ctx).V(1).Info("class checked by its driver", "provider", provider, "code", code.String(), "warnings", len(warnings))
	if code == dispatch.Unimplemented {
		return
	}
	for _, w := range warnings {
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventClassWarning,
			"The driver of provider %s warns: %s", provider, short(w))
	}
	switch code {
	case dispatch.OK:
		v.events.Eventf(class.Object, corev1.EventTypeNormal, EventClassAccepted,
			"The driver of provider %s accepts the class", provider)
	case dispatch.Unauthenticated, dispatch.PermissionDenied:
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventInvalidClass,
			"The driver of provider %s cannot use the class: %s: %s; correct the credentials in its secrets or what they may do",
			provider, code, short(err.Error()))
	default:
		v.events.Eventf(class.Object, corev1.EventTypeWarning, EventInvalidClass,
			"The driver of provider %s cannot use the class: %s: %s; correct the class and apply it again",
			provider, code, short(err.Error()))
	}
}

// short cuts a driver's text to what fits an Event.
func short(text string) string {
	if len(text) <= maxAnswer {
		return text
	}
	cut := maxAnswer
	for cut > 0 && !utf8.RuneStart(text[cut]) {
		cut--
	}

	return text[:cut] + "…"
}
