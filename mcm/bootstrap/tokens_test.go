package bootstrap

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
)

var apiServer *rest.Config // of the API server that all tests share

func TestMain(m *testing.M) {
	env := &envtest.Environment{}
	env.ControlPlane.GetAPIServer().Configure().Append("enable-bootstrap-token-auth", "true")
	kubetest.Main(m, env, func(cfg *rest.Config) error {
		apiServer = cfg

		return kubetest.Create(cfg, "deploy/kustomize/target-cluster/bootstrap-tokens.yaml")
	})
}

// A clock is set by hand.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.now
}

func (c *clock) forward(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

const groups = "system:bootstrappers:workers,system:bootstrappers:test"

func newTokens(t *testing.T) (*Tokens, *clock) {
	t.Helper()
	c, err := client.New(kubetest.AsMCM(apiServer), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	now := &clock{now: time.Now()}

	return &Tokens{Target: c, ExtraGroups: groups, Now: now.Now}, now
}

func newMachine(name string) *v1alpha1.Machine {
	return &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uuid.NewUUID()}}
}

func (t *Tokens) mustEnsure(tb testing.TB, m *v1alpha1.Machine) string {
	tb.Helper()
	token, err := t.Ensure(tb.Context(), m, time.Hour)
	if err != nil {
		tb.Fatal(err)
	}

	return token
}

// stored returns the machine's n-th candidate, nil when there is none.
func (t *Tokens) stored(tb testing.TB, uid types.UID, n int) *corev1.Secret {
	tb.Helper()
	secret, err := t.read(tb.Context(), tokenID(uid, n))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		tb.Fatal(err)
	}

	return secret
}

// logIn returns who the API server says the bearer of a token is.
func logIn(t *testing.T, token string) (authenticationv1.UserInfo, error) {
	t.Helper()
	cfg := rest.AnonymousClientConfig(apiServer)
	cfg.BearerToken = token
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	review := &authenticationv1.SelfSubjectReview{}
	err = c.Create(t.Context(), review)

	return review.Status.UserInfo, err
}

// mustLogIn waits for the API server's own cache.
func mustLogIn(t *testing.T, token string) authenticationv1.UserInfo {
	t.Helper()
	var user authenticationv1.UserInfo
	var err error
	if !poll(func() bool { user, err = logIn(t, token); return err == nil }) {
		t.Fatal("the API server does not take the token:", err)
	}

	return user
}

func poll(ok func() bool) bool {
	tick, limit := time.NewTicker(20*time.Millisecond), time.NewTimer(30*time.Second)
	defer tick.Stop()
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		}
	}

	return true
}

func TestANodeCanJoinWithTheToken(t *testing.T) {
	t.Parallel()
	tokens, now := newTokens(t)
	m := newMachine("joins")
	token := tokens.mustEnsure(t, m)
	user := mustLogIn(t, token)
	if want := "system:bootstrap:" + tokenID(m.UID, 0); user.Username != want {
		t.Errorf("the bearer is %s, want %s", user.Username, want)
	}
	for want := range strings.SplitSeq("system:bootstrappers,"+groups, ",") {
		if !slices.Contains(user.Groups, want) {
			t.Errorf("the bearer is in groups %q, want %s among them", user.Groups, want)
		}
	}
	secret := tokens.stored(t, m.UID, 0)
	id, half, _ := strings.Cut(token, ".")
	got := map[string]string{}
	for k, v := range secret.Data {
		got[k] = string(v)
	}
	if diff := cmp.Diff(map[string]string{
		"token-id": id, "token-secret": half, "auth-extra-groups": groups,
		"usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
		"expiration":  now.Now().Add(time.Hour).UTC().Format(time.RFC3339),
		"description": "A bootstrap token for machine ns/joins",
	}, got); diff != "" {
		t.Error("the Secret, -want +got:\n" + diff)
	}
	if secret.Type != "bootstrap.kubernetes.io/token" || secret.Namespace != "kube-system" || secret.Name != "bootstrap-token-"+id {
		t.Errorf("the Secret is %s/%s of type %s", secret.Namespace, secret.Name, secret.Type)
	}

	if err := tokens.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if !poll(func() bool { _, err := logIn(t, token); return apierrors.IsUnauthorized(err) }) {
		t.Error("a deleted token still opens the API server")
	}
}

func TestWithoutExtraGroups(t *testing.T) {
	t.Parallel()
	tokens, _ := newTokens(t)
	tokens.ExtraGroups = ""
	m := newMachine("plain")
	mustLogIn(t, tokens.mustEnsure(t, m))
	if got, ok := tokens.stored(t, m.UID, 0).Data[keyGroups]; ok {
		t.Errorf("%s is %q, want it absent: the API server would refuse an empty group", keyGroups, got)
	}
}

func TestTokenOverTime(t *testing.T) {
	t.Parallel()
	tokens, now := newTokens(t)
	m := newMachine("slow")
	first := tokens.mustEnsure(t, m)
	expires := func() string { return string(tokens.stored(t, m.UID, 0).Data[keyExpiration]) }
	before := expires()

	now.forward(59 * time.Minute)
	if again := tokens.mustEnsure(t, m); again != first || expires() != before {
		t.Error("a valid token is not reused as it is")
	}
	now.forward(2 * time.Minute)
	if again := tokens.mustEnsure(t, m); again != first {
		t.Error("the renewed token is another one: an instance that still boots with the first can never join")
	}
	if want := now.Now().Add(time.Hour).UTC().Format(time.RFC3339); expires() != want {
		t.Errorf("the renewed token expires at %s, want %s", expires(), want)
	}
}

func TestADamagedTokenIsMended(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		damage func(data map[string][]byte)
	}{
		"no expiration":    {"it would be valid for ever", func(d map[string][]byte) { delete(d, keyExpiration) }},
		"bad expiration":   {"the API server takes it for expired", func(d map[string][]byte) { d[keyExpiration] = []byte("soon") }},
		"no secret":        {"no node could log in", func(d map[string][]byte) { delete(d, keySecret) }},
		"malformed secret": {"the API server refuses it", func(d map[string][]byte) { d[keySecret] = []byte("UPPER CASE") }},
		"another's id":     {"the API server ignores it", func(d map[string][]byte) { d[keyID] = []byte("abcdef") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tokens, _ := newTokens(t)
			m := newMachine("damaged")
			tokens.mustEnsure(t, m)
			secret := tokens.stored(t, m.UID, 0)
			tc.damage(secret.Data)
			admin, err := client.New(apiServer, client.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if err := admin.Update(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
			token := tokens.mustEnsure(t, m)
			mustLogIn(t, token)
			secret = tokens.stored(t, m.UID, 0)
			if !tokens.valid(secret) {
				t.Errorf("the token was not mended (%s): expiration is %q", tc.reason, secret.Data[keyExpiration])
			}
		})
	}
}

// occupy stores another program's token under the machine's n-th candidate id.
func (t *Tokens) occupy(tb testing.TB, m *v1alpha1.Machine, n int, labels map[string]string) *corev1.Secret {
	tb.Helper()
	secret := t.secret(newMachine("other"), tokenID(m.UID, n), time.Hour)
	secret.Labels = labels
	if err := t.Target.Create(tb.Context(), secret); err != nil {
		tb.Fatal(err)
	}

	return secret
}

func TestAnIDThatIsTaken(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		labels map[string]string
	}{
		"another machine's": {"two machines must never share a token", map[string]string{LabelKeyMachineUID: string(uuid.NewUUID())}},
		"without our label": {"kubeadm and older managers have tokens without our label", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tokens, _ := newTokens(t)
			m := newMachine("collides")
			foreign := tokens.occupy(t, m, 0, tc.labels)

			token := tokens.mustEnsure(t, m)
			if want := tokenID(m.UID, 1) + "."; !strings.HasPrefix(token, want) {
				t.Errorf("the token does not begin with the second candidate %q (%s)", want, tc.reason)
			}
			if again := tokens.mustEnsure(t, m); again != token {
				t.Error("asked again, the token is another one")
			}
			mustLogIn(t, token)
			if err := tokens.Delete(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if left := tokens.stored(t, m.UID, 1); left != nil {
				t.Error("the machine's token is still there")
			}
			if diff := cmp.Diff(foreign, tokens.stored(t, m.UID, 0)); diff != "" {
				t.Errorf("the other token was touched (%s), -before +after:\n%s", tc.reason, diff)
			}
		})
	}
}

func TestAnIDThatBecomesFree(t *testing.T) {
	t.Parallel()
	tokens, _ := newTokens(t)
	m := newMachine("collided")
	foreign := tokens.occupy(t, m, 0, nil)
	tokens.mustEnsure(t, m)
	if err := tokens.Target.Delete(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	if err := tokens.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if tokens.stored(t, m.UID, 1) != nil {
		t.Error("the token outlives its machine because the first candidate has become free")
	}
}

func TestAllIDsTaken(t *testing.T) {
	t.Parallel()
	tokens, _ := newTokens(t)
	m := newMachine("unlucky")
	var halves []string
	for n := range candidates {
		halves = append(halves, string(tokens.occupy(t, m, n, nil).Data[keySecret]))
	}
	_, err := tokens.Ensure(t.Context(), m, time.Hour)
	if err == nil || !strings.Contains(err.Error(), "kube-system/bootstrap-token-"+tokenID(m.UID, 0)) {
		t.Fatalf("error is %v, want one that names the Secret", err)
	}
	for _, half := range halves {
		if strings.Contains(err.Error(), half) {
			t.Error("the error holds a token's secret")
		}
	}
}

func TestConcurrentEnsure(t *testing.T) {
	t.Parallel()
	tokens, now := newTokens(t)
	m := newMachine("popular")
	for _, round := range []string{"created", "renewed"} {
		const callers = 8
		got, errs := make([]string, callers), make([]error, callers)
		var all sync.WaitGroup
		for i := range callers {
			all.Go(func() { got[i], errs[i] = tokens.Ensure(t.Context(), m, time.Hour) })
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(round, err)
		}
		slices.Sort(got)
		if len(slices.Compact(got)) != 1 {
			t.Errorf("%s by many at once, there is more than one token", round)
		}
		now.forward(2 * time.Hour)
	}
	if tokens.stored(t, m.UID, 1) != nil {
		t.Error("a second token was made")
	}
}

func TestDeleteOfNothing(t *testing.T) {
	t.Parallel()
	tokens, _ := newTokens(t)
	if err := tokens.Delete(t.Context(), newMachine("never-had-one")); err != nil {
		t.Error(err)
	}
}

func TestRefusedArguments(t *testing.T) {
	t.Parallel()
	tokens, _ := newTokens(t)
	noUID := newMachine("no-uid")
	noUID.UID = ""
	if _, err := tokens.Ensure(t.Context(), noUID, time.Hour); err == nil {
		t.Error("Ensure takes a machine without uid: all of those would share a token")
	}
	if err := tokens.Delete(t.Context(), noUID); err == nil {
		t.Error("Delete takes a machine without uid")
	}
	m := newMachine("expired-from-birth")
	if _, err := tokens.Ensure(t.Context(), m, 0); err == nil || tokens.stored(t, m.UID, 0) != nil {
		t.Error("Ensure makes a token that is never valid")
	}
}

func TestTokenIDs(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 1000 {
		uid := uuid.NewUUID()
		for n := range candidates {
			id := tokenID(uid, n)
			if !regexpID(id) {
				t.Fatalf("id %q of machine %s is not of six lower-case letters and digits", id, uid)
			}
			if id != tokenID(uid, n) {
				t.Fatalf("the id of machine %s changes", uid)
			}
			seen[id] = true
		}
	}
	if len(seen) < 1000*candidates-1 { // 3,000 of two billion: two of them are the same once in 480 runs
		t.Errorf("%d ids of 1000 machines, want about %d", len(seen), 1000*candidates)
	}
}

func regexpID(id string) bool {
	return len(id) == idLength && strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

func TestValidateGroups(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason, groups string
		ok             bool
	}{
		"none":         {"the flag's default", "", true},
		"two":          {"a list", groups, true},
		"other prefix": {"the API server refuses tokens with it", "system:masters", false},
		"empty member": {"the API server refuses tokens with it", groups + ",", false},
		"space":        {"the API server does not trim", "system:bootstrappers:a, system:bootstrappers:b", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := ValidateGroups(tc.groups); (err == nil) != tc.ok {
				t.Errorf("ValidateGroups(%q) = %v, want ok %t: %s", tc.groups, err, tc.ok, tc.reason)
			}
		})
	}
}
