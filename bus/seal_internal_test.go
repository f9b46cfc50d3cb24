package bus

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The keys of the golden seals. They seal nothing else.
const (
	goldenPlaneSeed   = "SXAACAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAN4QM"
	goldenReplicaSeed = "SXAAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAT5QQ"
)

// A goldenSeal is a box with all that went into it.
type goldenSeal struct {
	SenderSeed    string `json:"senderSeed"`
	Sender        string `json:"sender"`
	RecipientSeed string `json:"recipientSeed"`
	Recipient     string `json:"recipient"`
	BoxNonce      string `json:"boxNonce"`
	Plain         string `json:"plain"` // a SecretContent
	Box           string `json:"box"`
}

func TestGoldenSeal(t *testing.T) {
	t.Parallel()
	content := &driverv1.SecretContent{
		Nonce:     []byte("0123456789abcdef"),
		Reference: &driverv1.ObjectReference{Namespace: "ns", Name: "cloud", Uid: "s-uid", ResourceVersion: "8"},
		Data:      map[string][]byte{"token": []byte("t0ps3cret")},
	}
	plain, err := proto.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	sender, recipient := goldenKey(t, goldenPlaneSeed), goldenKey(t, goldenReplicaSeed)
	nonce := bytes.Repeat([]byte{7}, 24)
	box, err := sender.pair.SealWithRand(plain, recipient.Public(), bytes.NewReader(nonce))
	if err != nil {
		t.Fatal(err)
	}
	got := goldenSeal{
		SenderSeed: goldenPlaneSeed, Sender: sender.Public(), RecipientSeed: goldenReplicaSeed, Recipient: recipient.Public(),
		BoxNonce: hex.EncodeToString(nonce), Plain: hex.EncodeToString(plain), Box: hex.EncodeToString(box),
	}
	const file = "testdata/seal.json"
	var want goldenSeal
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &want)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("boxes are made in another way (-want +got):\n%s", diff)
	}
	stored, err := hex.DecodeString(want.Box)
	if err != nil {
		t.Fatal(err)
	}
	opened := &driverv1.SecretContent{}
	if err := recipient.Open(&driverv1.Sealed{Box: stored}, want.Sender, opened); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(content, opened, protocmp.Transform()); diff != "" {
		t.Errorf("what was sealed (-want +got):\n%s", diff)
	}
}

func goldenKey(t *testing.T, seed string) *SealKey {
	t.Helper()
	key, err := ParseSealKey([]byte(seed))
	if err != nil {
		t.Fatal(err)
	}

	return key
}
