package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// TestUserData looks at what instances boot with: the values are filled in, the
// token lets a node in, and is gone once the node has joined.
func TestUserData(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(1, manager.NATSURL, tap)
	const template = "#!/bin/sh\njoin --name %s --token %s --again %[2]s\n"
	plain := func(s string) string { return s }
	cases := map[string]struct {
		reason string
		form   func(string) string
	}{
		"plain":   {"the usual form", plain},
		"escaped": {"a part of an Ignition file is a URL query", url.QueryEscape},
	}
	for class, c := range cases {
		secret := e.newSecret(class)
		secret.StringData["userData"] = fmt.Sprintf(template, c.form("<<MACHINE_NAME>>"), c.form("<<BOOTSTRAP_TOKEN>>"))
		e.must(e.kube.Create(e.ctx(), secret))
		e.must(e.kube.Create(e.ctx(), e.newClass(class, nil)))
		e.refuseNodes("*")
		name := e.createMachines(1, class)[0]
		instance := e.waitInstance(name)

		token := e.token(name)
		e.secret["bootstrap token"] = token
		want := sha256.Sum256(fmt.Appendf(nil, template, c.form(name), c.form(token)))
		if instance.UserDataSHA256 != hex.EncodeToString(want[:]) {
			t.Errorf("%s: the instance has other user data than the template with name and token in it", c.reason)
		}
		id, _, _ := strings.Cut(token, ".")
		user, err := e.whoAmI(token)
		if err != nil || user.Username != "system:bootstrap:"+id {
			t.Errorf("%s: with the token one is %q: %v", c.reason, user.Username, err)
		}

		e.refuseNodes()
		e.waitRunning(name)
		e.wantNoToken(name)
		e.eventually("the token is not accepted", func(context.Context) error {
			_, err := e.whoAmI(token)
			if apierrors.IsUnauthorized(err) {
				return nil
			}
			return errors.Join(errors.New("it still does"), err)
		})
		e.deleteAll(name)
	}
}

// refuseNodes keeps instances of these names from joining, and lets all others.
func (e *env) refuseNodes(patterns ...string) {
	e.Helper()
	if patterns == nil {
		patterns = []string{}
	}
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{NodeRefuse: &patterns})
	e.must(err)
}

func (e *env) waitInstance(machine string) (instance cloudapi.Instance) {
	e.Helper()
	e.eventually("there is an instance of "+machine, func(ctx context.Context) error {
		instances, err := e.cloud.Instances(ctx)
		for _, instance = range instances {
			if instance.Name == machine {
				return nil
			}
		}
		return errors.Join(errors.New("there is none"), err)
	})
	return instance
}

// token returns a machine's bootstrap token.
func (e *env) token(machine string) string {
	e.Helper()
	secrets := e.tokens(machine)
	if len(secrets) != 1 || secrets[0].Type != corev1.SecretTypeBootstrapToken {
		e.Fatalf("machine %s has %d bootstrap tokens, want 1", machine, len(secrets))
	}
	return string(secrets[0].Data["token-id"]) + "." + string(secrets[0].Data["token-secret"])
}

// whoAmI asks the API server who has a token.
func (e *env) whoAmI(token string) (authenticationv1.UserInfo, error) {
	e.Helper()
	admin, err := clientcmd.BuildConfigFromFlags("", e.cluster.Kubeconfig)
	e.must(err)
	cfg := rest.AnonymousClientConfig(admin)
	cfg.BearerToken = token
	client, err := kubernetes.NewForConfig(cfg)
	e.must(err)
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(
		e.ctx(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return review.Status.UserInfo, nil
}
